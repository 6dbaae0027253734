"""Rows that failed because their workers died can be found, on each database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from delaytasks.core.events import Events
from delaytasks.core.interfaces import Recovered
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.maintenance.sweeper import emit_recovered
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now
from delaytasks.worker.task_events import WorkerLostEvents
from tests.conformance.store_rows import RUNNING


def _add(store: Store, **values: Any) -> None:
    row = {
        "tag": "t",
        "message_body": "{}",
        "expected_time": db_now(),
        "update_time": db_now(),
        **values,
    }
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(**row))


def test_only_rows_that_lapsed_for_the_last_time_were_given_up(store: Store) -> None:
    running = {**RUNNING, "worker": "w/1", "attempts": 1}
    _add(store, id=1, **running, lapses=2)
    _add(store, id=2, **running, lapses=0)
    _add(store, id=3, status=int(Status.FAILED), lapses=0, attempts=1)
    lapsed = store.leases.release(["w/1"], 3)
    [task] = lapsed.worker_lost
    assert lapsed.total == 2
    assert (task.id, task.status, task.lapses) == (1, Status.FAILED, 3)
    assert "3 times in a row" in (task.error or "")
    assert store.leases.release(["w/1"], 3) == Recovered(0, [])


def test_a_lapse_names_the_time_limit_that_was_over(store: Store) -> None:
    began = store.tasks.now() - timedelta(seconds=7)
    running = {
        **RUNNING,
        "worker": "w/1",
        "attempts": 1,
        "execution_time": began,
    }
    _add(store, id=1, **running, tag="slow", lapses=2)
    _add(store, id=2, **running, tag="slow")
    _add(store, id=3, **running, tag="slower")
    _add(store, id=4, **running, tag="free", lapses=2)
    lapsed = store.leases.release(["w/1"], 3, {"slow": 5.0, "slower": 8.0})
    assert (lapsed.total, sorted(lapsed.timed_out)) == (4, [(1, "slow"), (2, "slow")])
    ends = {id: store.tasks.attempts(id)[0].error for id in (1, 2, 3, 4)}
    for id, error in ends.items():
        assert error is not None
        assert error.endswith("; its time limit of 5 s was over") is (id in (1, 2))
    errors = {task.id: task.error or "" for task in lapsed.worker_lost}
    assert errors.keys() == {1, 4}
    assert errors[1].endswith(
        "3 times in a row while this task ran; its time limit of 5 s was over"
    )
    assert errors[4].endswith("3 times in a row while this task ran")
    found = store.tasks.get(2)
    assert found is not None
    assert (found.status, found.lapses, found.version) == (Status.NOT_COMPLETE, 1, 1)
    events = Events()
    emit_recovered(events, lapsed)
    assert (
        events.counts["task.recovered"],
        events.counts["task.timed_out"],
        events.counts["task.worker_lost"],
    ) == (4, 2, 2)


class RecordingTaskEvents:
    """Record calls in place of `TaskEvents`."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str | None]] = []
        self.flushed = 0

    def worker_lost(self, task: DelayTask) -> None:
        self.rows.append((task.id, task.error))

    def flush(self) -> None:
        self.flushed = len(self.rows)


@pytest.mark.parametrize("sends_events", [True, False])
def test_subscribers_receive_an_event_for_each_row_that_was_given_up(
    store: Store, sends_events: bool
) -> None:
    running = {**RUNNING, "worker": "w/1", "attempts": 3}
    _add(store, id=1, **running, lapses=2)
    _add(store, id=2, **running, lapses=1)
    events, heard = Events(), RecordingTaskEvents()
    seen: list[tuple[str, int | None]] = []
    events.subscribe(
        lambda name, fields: seen.append((name, fields.get("id") or fields.get("count")))
    )
    events.subscribe(WorkerLostEvents(heard, lambda: sends_events))
    emit_recovered(events, store.leases.release(["w/1"], 3), reason="it died")
    assert seen == [("task.recovered", 2), ("task.worker_lost", 1)]
    assert [id for id, _ in heard.rows] == ([1] if sends_events else [])
    assert heard.flushed == len(heard.rows)
