"""Many tasks are cancelled, rescheduled and retried."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from delaytasks import BulkResult, DelayTasks, Status
from delaytasks.core.clock import to_us
from delaytasks.core.errors import (
    DuplicateTaskError,
    TaskNotFoundError,
)
from delaytasks.core.interfaces import Entry
from delaytasks.core.states import LIVE, MOVES
from delaytasks.runtime import runtime_of
from delaytasks.storage import bulk_moves as store_bulk
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import FAR, counts, pass_a_moment, put, schedule, statuses
from tests.conformance.store_rows import RUNNING, status_columns
from tests.recording import RecordingTimer


def test_cancel_many_cancels_waiting_tasks_and_counts_the_running_ones_as_refused(
    store: Store, delays: DelayTasks, timer: RecordingTimer
) -> None:
    tasks = {status: put(store, schedule(delays), **status_columns(status)) for status in Status}
    other = schedule(delays, "sms")
    result = delays.cancel_many(tag="mail")
    assert counts(result) == (3, 2, 1)
    for status, task in tasks.items():
        there = delays.get(task)
        if status in MOVES["cancel"].sources:
            assert (there.status, there.version) == (Status.CANCELLED, task.version + 1)
        else:
            assert (there.status, there.version) == (status, task.version)
    assert delays.get(other) == other
    assert delays.events.counts["task.cancelled"] == 2
    waited = [task for status, task in tasks.items() if status in MOVES["cancel"].sources]
    assert {(entry.id, entry.version) for entry in timer.disarmed} == {
        (task.id, task.version) for task in waited
    }


def test_keys_are_free_afterwards(store: Store, delays: DelayTasks) -> None:
    tasks = [schedule(delays, key=f"k{n}") for n in range(4)]
    running = put(store, tasks[3], **RUNNING)
    assert counts(delays.cancel_many(key_prefix="k")) == (4, 3, 1)
    for task in tasks[:3]:
        with pytest.raises(TaskNotFoundError):
            delays.get(tag="mail", key=task.key)
        schedule(delays, key=task.key)
    assert delays.get(tag="mail", key="k3") == running
    with pytest.raises(DuplicateTaskError):
        schedule(delays, key="k3")


def test_cancel_many_leaves_a_key_that_now_belongs_to_another_task(
    store: Store, delays: DelayTasks
) -> None:
    """The replaced task ran, and another program set it back to waiting."""
    old = put(store, schedule(delays, key="k"), **RUNNING)
    new = schedule(delays, key="k", on_conflict="replace", queue="other")
    put(store, old, status=int(Status.NOT_COMPLETE))
    assert counts(delays.cancel_many(queue="default")) == (1, 1, 0)
    assert delays.get(tag="mail", key="k").id == new.id


# -- reschedule ----------------------------------------------------------------------------------


def test_reschedule_many_arms_near_tasks_and_disarms_their_old_entries(
    store: Store, delays: DelayTasks, timer: RecordingTimer
) -> None:
    tasks = [
        schedule(delays, delay=5),
        schedule(delays),
        put(store, schedule(delays), status=int(Status.HELD)),
    ]
    running = put(store, schedule(delays), **RUNNING)
    for delay, is_near in ((2, True), (FAR, False)):
        timer.armed.clear(), timer.disarmed.clear()
        before = [delays.get(task) for task in tasks]
        now = runtime_of(delays).clock.now()
        assert counts(delays.reschedule_many(delay, tag="mail")) == (4, 3, 1)
        moved = [delays.get(task) for task in tasks]
        assert all(
            delay - 1 < (task.expected_time - now).total_seconds() < delay + 1 for task in moved
        )
        assert [(t.version, t.status) for t in moved] == [
            (b.version + 1, Status.NOT_COMPLETE) for b in before
        ]
        assert {(entry.id, entry.version) for entry in timer.disarmed} == {
            (b.id, b.version) for b in before
        }
        armed = [Entry(t.id, t.version, to_us(t.expected_time)) for t in moved] if is_near else []
        assert sorted(timer.armed) == sorted(armed)
    assert delays.get(running) == running


def test_a_shift_moves_each_task_by_the_same_time_but_none_into_the_past(
    delays: DelayTasks,
) -> None:
    tasks = [schedule(delays, delay=delay) for delay in (60, 3600, 7200.5)]
    pass_a_moment(delays)
    assert counts(delays.reschedule_many(by=timedelta(hours=1), everything=True)) == (3, 3, 0)
    moved = [delays.get(task) for task in tasks]
    assert [m.expected_time - t.expected_time for m, t in zip(moved, tasks, strict=True)] == [
        timedelta(hours=1)
    ] * 3
    assert counts(delays.reschedule_many(by=-3700, tag="mail")) == (3, 3, 0)
    first, *others = (delays.get(task) for task in tasks)
    assert abs((first.expected_time - runtime_of(delays).clock.now()).total_seconds()) < 5
    assert [
        (o.expected_time - t.expected_time).total_seconds()
        for o, t in zip(others, tasks[1:], strict=True)
    ] == [-100] * 2


def test_a_shift_at_the_end_of_time_leaves_a_task_where_it_is(
    store: Store, delays: DelayTasks
) -> None:
    last = datetime(9999, 12, 31, 23, tzinfo=timezone.utc)
    task = put(store, schedule(delays), expected_time=last)
    pass_a_moment(delays)
    assert counts(delays.reschedule_many(by=86400, tag="mail")) == (1, 1, 0)
    assert delays.get(task).expected_time == last


@pytest.mark.usefixtures("small")
def test_a_shift_does_not_move_a_task_again_in_a_later_window(delays: DelayTasks) -> None:
    tasks = [schedule(delays, delay=FAR + n) for n in range(20)]
    pass_a_moment(delays)
    assert counts(delays.reschedule_many(by=7, tag="mail")) == (20, 20, 0)
    assert {
        (delays.get(task).expected_time - task.expected_time).total_seconds() for task in tasks
    } == {7}


@pytest.mark.usefixtures("small")
def test_a_stopped_shift_can_be_continued_without_shifting_a_task_twice(delays: DelayTasks) -> None:
    tasks = [schedule(delays, delay=FAR + n) for n in range(20)]
    pass_a_moment(delays)
    seen: list[BulkResult] = []

    def stop(result: BulkResult) -> None:
        seen.append(result)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delays.reschedule_many(by=7, tag="mail", on_progress=stop)
    assert counts(seen[-1]) == (20, 9, 0)
    again = delays.reschedule_many(by=7, tag="mail", updated_until=seen[-1].started)
    assert counts(again) == (11, 11, 0)
    assert {
        (delays.get(task).expected_time - task.expected_time).total_seconds() for task in tasks
    } == {7}


@pytest.mark.usefixtures("small")
def test_a_task_that_the_search_returns_twice_is_shifted_once(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task was paused during the search, so both the waiting and the paused rows contain it."""
    tasks = [schedule(delays) for _ in range(5)]
    pass_a_moment(delays)
    matching = store_bulk.Bulk.matching
    monkeypatch.setattr(store_bulk.Bulk, "matching", lambda *of: [*matching(*of), *matching(*of)])
    assert delays.reschedule_many(by=7, tag="mail").changed == 5
    assert {
        (delays.get(task).expected_time - task.expected_time).total_seconds() for task in tasks
    } == {7}


# -- retry ---------------------------------------------------------------------------------------


def test_failed_tasks_run_again_and_cancelled_ones_if_asked_for(
    store: Store, delays: DelayTasks, timer: RecordingTimer
) -> None:
    used = {"attempts": 4, "lapses": 3}
    tasks = {
        status: put(store, schedule(delays), **status_columns(status), **used) for status in Status
    }
    timer.armed.clear()
    assert counts(delays.rerun_many(tag="mail")) == (1, 1, 0)
    failed = delays.get(tasks[Status.FAILED])
    assert (failed.status, failed.version, failed.attempts, failed.lapses) == (
        Status.NOT_COMPLETE,
        1,
        0,
        0,
    )
    assert [(entry.id, entry.version) for entry in timer.armed] == [(failed.id, 1)]
    assert delays.get(tasks[Status.CANCELLED]).status is Status.CANCELLED
    assert counts(delays.rerun_many(60, tag="mail", status="cancelled")) == (1, 1, 0)
    again = delays.get(tasks[Status.CANCELLED])
    assert again.status is Status.NOT_COMPLETE
    assert 55 < (again.expected_time - runtime_of(delays).clock.now()).total_seconds() < 61
    for status in LIVE | {Status.DONE}:
        assert delays.get(tasks[status]) == tasks[status]


def test_rerun_many_gives_each_task_its_key_back_unless_another_task_has_it(
    store: Store, delays: DelayTasks
) -> None:
    tasks = []
    for n in range(3):
        task = schedule(delays, key=f"k{n}")
        delays.cancel(task)
        tasks.append(put(store, task, status=int(Status.FAILED)))
    taken = schedule(delays, key="k1")
    assert counts(delays.rerun_many(tag="mail")) == (3, 2, 1)
    assert statuses(delays, *tasks) == [Status.NOT_COMPLETE, Status.FAILED, Status.NOT_COMPLETE]
    assert [delays.get(tag="mail", key=f"k{n}").id for n in range(3)] == [
        tasks[0].id,
        taken.id,
        tasks[2].id,
    ]
    [entry] = delays.audit()
    assert (entry.changed, entry.refused, entry.state) == (2, 1, "done")
    assert counts(delays.rerun_many(tag="mail")) == (1, 0, 1), "again: the same one is refused"
