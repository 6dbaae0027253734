"""Cancel, reschedule, retry and touch single rows, on every database."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from delaytasks.core.errors import (
    CancelTooLateError,
    InvalidStatusError,
    OutcomeUnknownError,
    StaleVersionError,
    TaskNotFoundError,
)
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.store import Store
from tests.conformance.store_rows import (
    add,
    put,
    read,
    second_store,
    seconds,
    task,
)
from tests.proxy import Proxy

OPERATORS: dict[str, Callable[[Store, DelayTask], Any]] = {
    "cancel": lambda store, made: store.tasks.cancel(made.id),
    "reschedule": lambda store, made: store.tasks.reschedule(
        made.id, seconds(made.expected_time, 60)
    ),
    "rerun": lambda store, made: store.tasks.rerun(made.id, seconds(made.expected_time, 60)),
}


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.name)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_move_is_made_from_its_sources_and_refused_elsewhere(
    store: Store, name: str, status: Status
) -> None:
    made, move = put(store, status, lapses=2, attempts=3), MOVES[name]
    if status in move.sources:
        moved = OPERATORS[name](store, made)
        found = read(store, made.id)
        assert (found.status, found.version) == (moved.status, moved.version) == (move.target, 1)
        later = 0 if name == "cancel" else 60
        assert found.expected_time == moved.expected_time == seconds(made.expected_time, later)
        assert (found.attempts, found.lapses) == ((0, 0) if name == "rerun" else (3, 2))
        assert found.update_time is not None
        assert made.create_time is not None
        assert found.update_time >= made.create_time
        return
    if name == "cancel" and status is Status.CANCELLED:
        assert store.tasks.cancel(made.id) is None
    else:
        expected = (
            CancelTooLateError
            if (name, status) == ("cancel", Status.RUNNING)
            else InvalidStatusError
        )
        with pytest.raises(expected, match=str(made.id)):
            OPERATORS[name](store, made)
    found = read(store, made.id)
    assert (found.status, found.version) == (status, 0)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_error_of_an_operators_move_names_the_missing_task(store: Store, name: str) -> None:
    with pytest.raises(TaskNotFoundError, match="no task") as caught:
        OPERATORS[name](store, task(store))
    assert caught.value.id is not None


def test_a_move_with_a_stale_version_is_refused(store: Store) -> None:
    made = add(store)
    store.tasks.reschedule(made.id, made.expected_time, version=0)
    for name in ("reschedule", "rerun"):
        with pytest.raises(StaleVersionError, match="version 1, not 0"):
            getattr(store.tasks, name)(made.id, made.expected_time, version=0)
    with pytest.raises(StaleVersionError):
        store.tasks.cancel(made.id, version=0)
    assert read(store, made.id).version == 1


def test_of_simultaneous_cancels_one_succeeds_and_the_others_report_its_result(
    store: Store,
) -> None:
    made = add(store)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: store.tasks.cancel(made.id), range(4)))
    assert [answer is None for answer in answers].count(False) == 1
    assert read(store, made.id).version == 1


def test_a_move_belongs_to_the_callers_transaction(store: Store) -> None:
    made = add(store)
    with store.database.tx.connect() as connection:
        transaction = connection.begin()
        store.tasks.cancel(made.id, on=connection)
        transaction.rollback()
    assert read(store, made.id).status is Status.NOT_COMPLETE


@pytest.mark.parametrize("name", OPERATORS)
def test_a_repeated_move_whose_first_try_succeeded_is_done_or_unknown_not_refused(
    store: Store, name: str
) -> None:
    url = store.database.url
    if url.host is None:
        return  # SQLite has no network answer that could be lost
    proxy = Proxy(url.host, url.port or {"postgresql": 5432, "mysql": 3306}[url.get_backend_name()])
    other = second_store(store, proxy.url(url.render_as_string(hide_password=False)))
    made = put(store, Status.FAILED if name == "rerun" else Status.NOT_COMPLETE)
    other.tasks.cancel(add(store).id)  # opens the connection
    proxy.cut_answer(rb"COMMIT(?!TED)")
    if name == "cancel":
        left = other.tasks.cancel(made.id, version=0)
        assert left is not None
        assert (left.status, left.version) == (Status.CANCELLED, 1)
    else:
        with pytest.raises(OutcomeUnknownError, match=f"look at task {made.id}") as caught:
            getattr(other.tasks, name)(made.id, seconds(made.expected_time, 60), version=0)
        assert isinstance(caught.value.__cause__, StaleVersionError)
    assert proxy.cut == 1
    assert read(store, made.id).version == 1
    other.close()
    proxy.close()


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.name)
def test_touch_only_moves_later_and_keeps_the_version(store: Store, status: Status) -> None:
    made = put(store, status)
    can = status in MOVES["reschedule"].sources
    later, earlier = seconds(made.expected_time, 60), seconds(made.expected_time, -60)
    assert store.touches.touch(made.id, earlier) is can
    assert read(store, made.id).expected_time == made.expected_time
    assert store.touches.touch(made.id, later) is can
    found = read(store, made.id)
    assert found.expected_time == (later if can else made.expected_time)
    assert (found.version, found.status) == (0, status)
