"""`find` and the bulk functions have the same filters, on each database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaytasks import DelayTask, DelayTasks, InvalidQueryError, Status
from delaytasks.core.errors import DelayTaskError, InvalidIdError
from delaytasks.core.filters import Filters
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import NOON, put
from tests.conformance.store_rows import RUNNING

SECOND = timedelta(seconds=1)


@pytest.fixture
def tasks(store: Store, delays: DelayTasks) -> dict[str, DelayTask]:
    """Return one task for each way in which tasks differ."""
    tasks = {
        # The order of ids is not that of due times.
        "done": delays.schedule_at("b", 5, NOON + 4 * SECOND),
        "second": delays.schedule_at("a", 2, NOON + SECOND, queue="slow", key="us-1"),
        "first": delays.schedule_at("a", 1, NOON, key="eu-1"),
        "failed": delays.schedule_at("b", 3, NOON + 2 * SECOND, priority=3),
        "cancelled": delays.schedule_at("b", 4, NOON + 3 * SECOND, queue="slow"),
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


def test_find_reads_the_tasks_with_some_ids_in_the_order_of_their_due_times(
    delays: DelayTasks, tasks: dict[str, DelayTask]
) -> None:
    done, second, first = (tasks[name].id for name in ("done", "second", "first"))

    def found(ids: Any, **options: Any) -> list[int]:
        return [task.id for task in delays.find(ids=ids, **options)]

    assert found([done, str(first), done, 999]) == [first, done]
    assert found({done, first}, newest_first=True) == [done, first]
    assert found(second) == found(str(second)) == [second]
    assert found((first, second, done), status=["DONE", "FAILED"]) == [done]
    assert found((first, second), tag="a", queue="slow") == [second]
    page = delays.find(ids=[done, first, second], limit=2)
    assert [task.id for task in page] == [first, second]
    assert found([done, first, second], cursor=page.cursor) == [done]
    assert found([*range(1, 1000), first]) == [first]


def test_the_bulk_functions_move_the_tasks_with_some_ids_only(
    delays: DelayTasks, tasks: dict[str, DelayTask]
) -> None:
    first, second, failed, done = (tasks[n].id for n in ("first", "second", "failed", "done"))
    assert delays.cancel_many(ids=[first, done], dry_run=True).matched == 1
    assert delays.reschedule_many(at=NOON + 9 * SECOND, ids=[first, second, done]).changed == 2
    assert delays.get(second).due == NOON + 9 * SECOND
    cancelled = delays.cancel_many(ids=[str(first)])
    assert (cancelled.matched, cancelled.changed) == (1, 1)
    assert delays.audit(limit=1)[0].filter == {"ids": [str(first)]}
    assert delays.get(second).status is Status.NOT_COMPLETE
    assert delays.rerun_many("1h", ids=[first, failed, done]).changed == 1
    assert delays.rerun_many("1h", ids=[first], status="CANCELLED").changed == 1
    assert delays.cancel_many(ids=[first, second], queue="slow").changed == 1


def test_a_task_of_some_ids_that_runs_is_left_as_it_is(
    store: Store, delays: DelayTasks, tasks: dict[str, DelayTask]
) -> None:
    put(store, tasks["first"], **RUNNING)
    result = delays.cancel_many(ids=[tasks["first"].id, tasks["second"].id])
    assert (result.matched, result.changed, result.refused) == (2, 1, 1)


@pytest.mark.parametrize(
    ("ids", "error", "says"),
    [
        ([], InvalidQueryError, "ids is empty"),
        (b"12", InvalidIdError, "b'12'"),
        ({7: "first"}, InvalidIdError, "first"),
        (range(1, 1002), InvalidQueryError, "at most 1,000"),
        (["7", "seven"], InvalidIdError, "seven"),
        ([0], InvalidIdError, "1 to"),
        (True, InvalidIdError, "True"),
        ("1,2", InvalidIdError, "1,2"),
    ],
)
def test_wrong_ids_are_refused(
    delays: DelayTasks, ids: Any, error: type[DelayTaskError], says: str
) -> None:
    for call in (delays.find, delays.cancel_many, delays.rerun_many):
        with pytest.raises(error, match=says):
            call(ids=ids)


def test_a_filter_that_does_not_exist_is_refused_by_find_too(delays: DelayTasks) -> None:
    with pytest.raises(InvalidQueryError, match="colour"):
        delays.find(colour="red")  # type: ignore[call-arg]
