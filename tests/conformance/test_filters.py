"""`find` and the bulk functions have the same filters, on each database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaytasks import DelayTask, DelayTasks, InvalidQueryError, Status
from delaytasks.core.filters import Filters
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import NOON, put

SECOND = timedelta(seconds=1)


@pytest.fixture
def tasks(store: Store, delays: DelayTasks) -> dict[str, DelayTask]:
    """Return one task for each way in which tasks differ."""
    tasks = {
        "first": delays.schedule_at("a", 1, NOON, key="eu-1"),
        "second": delays.schedule_at("a", 2, NOON + SECOND, queue="slow", key="us-1"),
        "failed": delays.schedule_at("b", 3, NOON + 2 * SECOND, priority=3),
        "cancelled": delays.schedule_at("b", 4, NOON + 3 * SECOND, queue="slow"),
        "done": delays.schedule_at("b", 5, NOON + 4 * SECOND),
    }
    put(store, tasks["failed"], status=int(Status.FAILED), create_time=NOON)
    put(store, tasks["cancelled"], status=int(Status.CANCELLED))
    put(store, tasks["done"], status=int(Status.DONE), update_time=NOON)
    return tasks


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({"key_prefix": "eu-"}, "first"),
        ({"key": "us-1"}, "second"),
        ({"queue": "slow"}, "second cancelled"),
        ({"queue": "slow", "status": "CANCELLED"}, "cancelled"),
        ({"status": ["FAILED", Status.CANCELLED]}, "failed cancelled"),
        ({"status": ("FAILED", "NOT_COMPLETE")}, "first second failed"),
        ({"status": {"DONE", "FAILED"}, "tag": "b"}, "failed done"),
        ({"created_since": NOON}, "failed"),
        ({"created_until": NOON, "tag": "b"}, "cancelled done"),
        ({"updated_until": NOON + SECOND, "since": NOON + 4 * SECOND}, "done"),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_find_has_the_filters_of_the_bulk_functions_and_takes_several_statuses(
    delays: DelayTasks, tasks: dict[str, DelayTask], filters: Any, wanted: str, limit: int
) -> None:
    assert filters.keys() <= Filters.__annotations__.keys()
    found: list[DelayTask] = []
    for newest_first in (False, True):
        found.clear()
        page = delays.find(limit=limit, newest_first=newest_first, **filters)
        found += page
        while page.cursor is not None:
            page = delays.find(
                limit=limit, cursor=page.cursor, newest_first=newest_first, **filters
            )
            found += page
        names = [name for one in found for name, task in tasks.items() if task.id == one.id]
        assert names == (wanted.split()[::-1] if newest_first else wanted.split())


def test_a_bulk_function_takes_several_statuses_and_a_key(
    delays: DelayTasks, tasks: dict[str, DelayTask]
) -> None:
    assert delays.cancel_many(key="eu-1").changed == 1
    assert delays.rerun_many("1h", status=["FAILED", "CANCELLED"], tag="b").changed == 2
    with pytest.raises(InvalidQueryError, match="not DONE"):
        delays.rerun_many(status=["FAILED", "DONE"])


def test_a_filter_that_does_not_exist_is_refused_by_find_too(delays: DelayTasks) -> None:
    with pytest.raises(InvalidQueryError, match="colour"):
        delays.find(colour="red")  # type: ignore[call-arg]
