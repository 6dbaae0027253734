"""`rerun_many(audit=…)` runs the tasks of a cancel again that have not moved since."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks import BulkResult, DelayTasks, InvalidIdError, InvalidQueryError, Status
from delaytasks.operations import bulk_calls as bulk
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import counts, put, schedule, statuses
from tests.recording import RecordingTimer


def test_cancelled_tasks_wait_again_with_their_keys_and_due_times(
    store: Store, delays: DelayTasks, timer: RecordingTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BULK_ROWS", 2)
    tasks = [schedule(delays, delay=86_400.0 + n, key=f"k{n}" if n % 2 else None) for n in range(7)]
    held, retried = tasks[0], put(store, tasks[1], attempts=2)
    put(store, held, status=int(Status.HELD))
    deferred = put(store, tasks[2], due_time=tasks[2].expected_time - timedelta(hours=1))
    result = delays.cancel_many(tag="mail")
    assert result.changed == 7
    assert counts(delays.rerun_many(audit=result.runs[0], dry_run=True)) == (7, 0, 0)
    progress: list[BulkResult] = []
    again = delays.rerun_many(audit=result.runs[0], actor="ann", on_progress=progress.append)
    assert counts(again) == (7, 7, 0)
    assert len(progress) == 4
    assert delays.get(retried).attempts == 0
    assert delays.get(deferred).due == deferred.due
    for task in [held, *tasks[2:]]:
        found = delays.get(task)
        assert (found.status, found.due, found.key) == (Status.NOT_COMPLETE, found.due, task.key)
        assert found.due == (deferred.due if task.id == deferred.id else task.due)
    assert delays.get(tag="mail", key="k1").id == tasks[1].id
    [entry, _] = delays.audit()
    assert (entry.action, entry.actor) == ("rerun", "ann")
    assert entry.filter["audit"] == str(result.runs[0])
    assert counts(delays.rerun_many(audit=str(result.runs[0]))) == (7, 0, 7), "they have moved"
    assert {e.id for e in timer.armed} <= {task.id for task in tasks}


def test_a_delay_and_filters_hold_for_the_tasks_of_an_operation(delays: DelayTasks) -> None:
    tasks = [schedule(delays, tag=tag, key="k") for tag in ("mail", "pay")]
    [entry] = [delays.cancel_many(everything=True) and delays.audit(limit=1)[0]]
    assert counts(delays.rerun_many("1h", audit=entry, tag="pay")) == (2, 1, 1)
    assert statuses(delays, *tasks) == [Status.CANCELLED, Status.NOT_COMPLETE]
    due_in = delays.get(tasks[1]).due - runtime_of(delays).clock.now()
    assert timedelta(minutes=59) < due_in <= timedelta(hours=1)


def test_tasks_that_have_moved_since_are_left_as_they_are(store: Store, delays: DelayTasks) -> None:
    plain, keyed, rerun, taken, gone, again = (
        schedule(delays, key=key) for key in (None, "k1", "k2", "k3", None, None)
    )
    result = delays.cancel_many(tag="mail")
    delays.rerun(rerun, "2d")
    delays.rerun(again, "2d")
    delays.cancel(again)
    new = schedule(delays, key="k3")
    with store.database.begin() as connection:
        connection.execute(store.schema.tasks.delete().where(store.schema.tasks.c.id == gone.id))
    before = delays.get(rerun)
    assert counts(delays.rerun_many(audit=result.runs[0])) == (6, 2, 4)
    assert statuses(delays, plain, keyed, taken, again) == [
        Status.NOT_COMPLETE,
        Status.NOT_COMPLETE,
        Status.CANCELLED,
        Status.CANCELLED,
    ]
    assert delays.get(rerun) == before
    assert delays.get(tag="mail", key="k3").id == new.id


@pytest.mark.parametrize("point", ["_step", "_lock"])
def test_a_task_that_moves_before_it_is_locked_is_left_as_it_is(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(bulk, "BUSY_S", 0)
    task = schedule(delays)
    result = delays.cancel_many(tag="mail")
    store = runtime_of(delays).store.bulk
    unpatched = getattr(store, point)

    def late(on: Any, *given: Any) -> Any:
        t = store._t
        on.execute(update(t).where(t.c.id == task.id).values(version=t.c.version + 1))
        return unpatched(on, *given)

    monkeypatch.setattr(store, point, late)
    assert counts(delays.rerun_many(audit=result.runs[0])) == (1, 0, 1)
    assert delays.get(task).status is Status.CANCELLED


def test_an_entry_without_cancelled_tasks_is_refused(store: Store, delays: DelayTasks) -> None:
    put(store, schedule(delays), status=int(Status.FAILED))
    for result in (delays.rerun_many(tag="mail"), delays.reschedule_many(60, tag="mail")):
        with pytest.raises(InvalidQueryError, match="only the tasks of a cancel"):
            delays.rerun_many(audit=result.runs[0])
    with pytest.raises(InvalidQueryError, match="no audit entry 7"):
        delays.rerun_many(audit=7)
    with pytest.raises(InvalidIdError):
        delays.rerun_many(audit="none")


def test_the_ids_of_an_operation_are_purged_with_its_audit_entry(
    store: Store, delays: DelayTasks
) -> None:
    schedule(delays)
    result = delays.cancel_many(tag="mail")
    audit = store.bulk._audit
    assert list(audit.recorded(result.runs[0]))
    audit.purge(-60)
    assert delays.audit() == []
    assert not list(audit.recorded(result.runs[0]))


def test_the_tasks_of_an_operation_that_still_runs_are_not_rerun(delays: DelayTasks) -> None:
    schedule(delays)
    refused: list[str] = []

    def rerun(_: BulkResult) -> None:
        with pytest.raises(InvalidQueryError, match="still runs"):
            delays.rerun_many(audit=delays.audit()[0])
        refused.append("once")

    assert delays.cancel_many(tag="mail", on_progress=rerun).changed == 1
    assert refused


def test_the_tasks_of_an_operation_whose_process_has_died_are_rerun_later(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk.BulkRun, "_end", lambda *_: None)
    schedule(delays)
    result = delays.cancel_many(tag="mail")
    assert delays.audit()[0].state == "running"
    with pytest.raises(InvalidQueryError, match="still runs"):
        delays.rerun_many(audit=result.runs[0])
    monkeypatch.setattr(bulk, "RUNNING_S", -1)
    assert counts(delays.rerun_many(audit=result.runs[0])) == (1, 1, 0)
