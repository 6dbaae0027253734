"""Bulk operations are undone for tasks that have not moved since."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks import BulkResult, DelayTask, DelayTasks, InvalidIdError, InvalidQueryError, Status
from delaytasks.operations import bulk, bulk_run
from delaytasks.storage.store import Store
from delaytasks.wiring import wiring_of
from tests.conformance.bulk.bulk_tasks import counts, put, schedule, statuses
from tests.recording import RecordingTimer


def shown(task: DelayTask) -> tuple[Any, ...]:
    return (task.status, task.due, task.attempts, task.key)


def test_cancelled_tasks_wait_again_with_their_keys_and_attempts(
    store: Store, delays: DelayTasks, timer: RecordingTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_run, "BULK_ROWS", 2)
    tasks = [schedule(delays, key=f"k{n}" if n % 2 else None) for n in range(7)]
    held, retried = tasks[0], put(store, tasks[1], attempts=2)
    put(store, held, status=int(Status.HELD))
    result = delays.cancel_many(tag="mail")
    assert result.changed == 7
    progress: list[BulkResult] = []
    undone = delays.undo(result, actor="ann", on_progress=progress.append)
    assert counts(undone) == (7, 7, 0)
    assert len(progress) == 4
    assert [shown(delays.get(task)) for task in tasks[1:]] == [
        shown(retried),
        *(shown(task) for task in tasks[2:]),
    ]
    assert delays.get(held).status is Status.NOT_COMPLETE, "the sweep holds it again if need be"
    assert delays.get(tag="mail", key="k1").id == tasks[1].id
    [entry, _] = delays.audit()
    assert (entry.action, entry.actor, entry.filter) == (
        "undo",
        "ann",
        {"audit": str(result.runs[0])},
    )
    assert counts(delays.undo(result)) == (7, 0, 7), "again: they have moved since"
    assert {e.id for e in timer.armed} <= {task.id for task in tasks}


@pytest.mark.parametrize("change", [{"by": "1h"}, {"delay": 60}])
def test_rescheduled_tasks_get_their_due_times_back(
    store: Store, delays: DelayTasks, change: dict[str, Any]
) -> None:
    tasks = [schedule(delays, delay=86_400.0 + n, key=f"k{n}") for n in range(3)]
    deferred = put(store, tasks[0], due_time=tasks[0].expected_time - timedelta(hours=1))
    result = delays.reschedule_many(tag="mail", **change)
    assert counts(delays.undo(str(result.runs[0]))) == (3, 3, 0)
    assert [delays.get(task).due for task in tasks] == [
        deferred.due,
        *(task.due for task in tasks[1:]),
    ]


def test_tasks_that_have_moved_since_are_left_as_they_are(store: Store, delays: DelayTasks) -> None:
    plain, keyed, rerun, taken, gone = (
        schedule(delays, key=key) for key in (None, "k1", "k2", "k3", None)
    )
    [entry] = [delays.cancel_many(tag="mail") and delays.audit(limit=1)[0]]
    delays.rerun(rerun, "2d")
    new = schedule(delays, key="k3")
    with store.database.begin() as connection:
        connection.execute(store.schema.tasks.delete().where(store.schema.tasks.c.id == gone.id))
    before = delays.get(rerun)
    assert counts(delays.undo(entry)) == (5, 2, 3)
    assert statuses(delays, plain, keyed, taken) == [
        Status.NOT_COMPLETE,
        Status.NOT_COMPLETE,
        Status.CANCELLED,
    ]
    assert delays.get(rerun) == before
    assert delays.get(tag="mail", key="k3").id == new.id


def test_tasks_that_have_the_same_status_again_are_left_as_they_are(delays: DelayTasks) -> None:
    tasks = [schedule(delays, key=key) for key in (None, "k1")]
    cancelled = delays.cancel_many(tag="mail")
    for task in tasks:
        delays.rerun(task, "1h")
        delays.cancel(task)
    assert counts(delays.undo(cancelled)) == (2, 0, 2)

    moved = schedule(delays)
    rescheduled = delays.reschedule_many(60, tag="mail", status="NOT_COMPLETE")
    due = delays.reschedule(moved, "2h").due
    assert counts(delays.undo(rescheduled)) == (1, 0, 1)
    assert delays.get(moved).due == due


def test_a_task_that_moves_before_it_is_locked_is_left_as_it_is(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_run, "BUSY_S", 0)
    task = schedule(delays)
    result = delays.reschedule_many(60, tag="mail")
    moved = delays.get(task).due
    store = wiring_of(delays).shards[0].store.bulk
    lock = store._lock

    def lock_late(on: Any, named: Any, ids: Any) -> Any:
        t = store._t
        on.execute(update(t).where(t.c.id.in_(ids)).values(version=t.c.version + 1))
        return lock(on, named, ids)

    monkeypatch.setattr(store, "_lock", lock_late)
    assert counts(delays.undo(result)) == (1, 0, 1)
    assert delays.get(task).due == moved


def test_an_operation_that_cannot_be_undone_is_refused(store: Store, delays: DelayTasks) -> None:
    put(store, schedule(delays), status=int(Status.FAILED))
    rerun = delays.rerun_many(tag="mail")
    with pytest.raises(InvalidQueryError, match="'rerun'; only cancel and reschedule"):
        delays.undo(rerun)
    undone = delays.undo(delays.cancel_many(tag="mail"))
    with pytest.raises(InvalidQueryError, match="'undo'"):
        delays.undo(undone)
    with pytest.raises(InvalidQueryError, match="no audit entry 7"):
        delays.undo(7)
    with pytest.raises(InvalidQueryError, match="dry run"):
        delays.undo(delays.cancel_many(tag="mail", dry_run=True))
    with pytest.raises(InvalidIdError):
        delays.undo("none")


def test_the_undo_rows_of_an_operation_are_purged_with_its_audit_entry(
    store: Store, delays: DelayTasks
) -> None:
    schedule(delays)
    result = delays.cancel_many(tag="mail")
    assert list(store.bulk.recorded(result.runs[0]))
    store.bulk._audit.purge(-60)
    assert delays.audit() == []
    assert not list(store.bulk.recorded(result.runs[0]))


def test_an_operation_that_still_runs_is_not_undone(delays: DelayTasks) -> None:
    schedule(delays)
    refused: list[str] = []

    def undo(_: BulkResult) -> None:
        with pytest.raises(InvalidQueryError, match="still runs"):
            delays.undo(delays.audit()[0])
        refused.append("once")

    assert delays.cancel_many(tag="mail", on_progress=undo).changed == 1
    assert refused


def test_an_operation_whose_process_has_died_is_undone_later(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_run.BulkRun, "_end", lambda *_: None)
    schedule(delays)
    result = delays.cancel_many(tag="mail")
    assert delays.audit()[0].state == "running"
    with pytest.raises(InvalidQueryError, match="still runs"):
        delays.undo(result)
    monkeypatch.setattr(bulk, "RUNNING_S", -1)
    assert counts(delays.undo(result)) == (1, 1, 0)
