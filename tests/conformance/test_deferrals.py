"""Deferred tasks and their due times, on every database."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from delaytasks import (
    DelayedTask,
    DelayTasks,
    DuplicateTaskError,
    Retry,
    RetrySchedule,
    Snooze,
    Status,
)
from delaytasks.console.queries import ConsoleQueries
from delaytasks.core.interfaces import Entry
from delaytasks.core.text import is_deferred_until
from delaytasks.execution.executor import DeferralRules, LeaseEndsError
from delaytasks.processors.registry import Registry
from delaytasks.runtime import runtime_of
from delaytasks.storage import settlements as putoffs
from delaytasks.storage.state_queries import LiveRows
from delaytasks.storage.store import Store
from delaytasks.storage.sweep_queries import OverdueRows
from delaytasks.worker.celery_tasks import processes_of
from delaytasks.worker.worker_runtime import WorkerRuntime
from tests.recording import runner_of
from tests.world import MakeWorld, World
from tests.world.broker import RecordingTimer

# Rows that were deferred because no worker had a processor for their tag


def defer(
    delays: DelayTasks, count: int = 1, tag: str = "new", **options: Any
) -> list[DelayedTask]:
    """Return deferred tasks as an older worker leaves them."""
    tasks = [delays.schedule_delay(tag, n, 0, **options) for n in range(count)]
    assert runner_of(delays).run([Entry(task.id, 0, 0) for task in tasks]).ran == count
    found = [delays.get(task) for task in tasks]
    assert all(
        task.status is Status.NOT_COMPLETE and task.expected_time > runtime_of(delays).clock.now()
        for task in found
    )
    return found


def bring(delays: DelayTasks, *tags: str, queue: str = "default") -> list[int]:
    return [
        entry.id
        for entry in runtime_of(delays).store.deferred_rows.bring_forward(tags, [queue], 600)
    ]


def test_a_worker_with_the_processor_brings_deferred_rows_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    tasks = defer(delays, 3)
    assert bring(delays, "other") == []
    assert bring(delays, "new", queue="other") == []
    entries = runtime_of(delays).store.deferred_rows.bring_forward(
        ["other", "new"], ["default"], 600
    )
    assert [entry.id for entry in entries] == [task.id for task in tasks]
    ran: list[int] = []
    delays.processor("new")(ran.append)
    runner_of(delays).run(entries)
    assert (sorted(ran), [delays.get(task).status for task in tasks]) == (
        [0, 1, 2],
        [Status.DONE] * 3,
    )
    assert bring(delays, "new") == []


def test_rows_that_wait_for_their_own_due_time_are_not_brought_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    near = delays.schedule_delay("new", {}, 60)
    [moved, touched, held, stays] = defer(delays, 4)
    delays.reschedule(moved, 60)
    delays.touch(touched, 60)
    with runtime_of(delays).store.database.begin() as other:
        t = runtime_of(delays).store.schema.tasks
        other.execute(select(t).where(t.c.id == held.id).with_for_update()).all()
        # SQLite locks the whole database.
        if runtime_of(delays).store.database.url.get_backend_name() != "sqlite":
            assert bring(delays, "new") == [stays.id]
    expected = {near.id: near.expected_time}
    expected |= {id: delays.get(id).expected_time for id in (moved.id, touched.id)}
    assert set(bring(delays, "new")) <= {held.id, stays.id}
    assert {id: delays.get(id).expected_time for id in expected} == expected


def test_a_retried_task_waits_for_its_retry_delay_whatever_its_error_text_is(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    def fail(body: Any) -> None:
        raise ValueError("no such processor, tag=new; next try at 2026")

    delays.processor("new", retries="5m")(fail)
    task = delays.schedule_delay("new", {}, 0)
    runner_of(delays).run([Entry(task.id, 0, 0)])
    assert delays.get(task).runs == 1
    assert bring(delays, "new") == []


def test_deferred_rows_of_several_batches_are_all_brought_forward(
    delays: DelayTasks, timer: RecordingTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putoffs, "DEFERRED_BATCH_ROWS", 7)
    store: Store = runtime_of(delays).store
    some = putoffs.DeferredRows(store.database, store.schema)
    tasks = defer(delays, 30)
    delays.reschedule(tasks[6], 30)
    entries = some.bring_forward(["new"], ["default"], 600)
    assert sorted(entry.id for entry in entries) == sorted(
        task.id for task in tasks if task is not tasks[6]
    )


def test_the_error_of_a_row_says_when_it_is_tried_again(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    [task] = defer(delays)
    assert task.error is not None
    at = datetime.fromisoformat(task.error.rpartition("next try at ")[2])
    assert at == task.expected_time
    assert timedelta(seconds=4) < at - runtime_of(delays).clock.now() <= timedelta(seconds=5)


def test_a_worker_of_all_queues_brings_rows_forward_without_queue_names(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    tasks = defer(delays, 2) + defer(delays, 1, queue="other")
    entries = runtime_of(delays).store.deferred_rows.bring_forward(["new"], None, 600)
    assert [entry.id for entry in entries] == [task.id for task in tasks]


# Rows that were deferred because no worker could enforce the time limits of their tag


def defer_by_limit(delays: DelayTasks) -> Any:
    """Defer a row as a worker with threads does."""
    task = delays.schedule_delay("limited", {}, 0)
    claims = runtime_of(delays).store.claims("w", None)
    [claimed] = claims.claim_due("default", [0], 1)
    runtime = runtime_of(delays)
    registry = Registry()
    registry.processor("limited", time_limit=60)(lambda body: None)
    rules = DeferralRules(
        delays.settings, runtime.clock, delays.events, registry, False, lambda id, version: False
    )
    deferral = rules.settlement(registry.get("limited"), claimed)
    assert deferral is not None
    assert claims.settle([deferral])
    found = delays.get(task)
    assert (found.status, found.expected_time > runtime_of(delays).clock.now()) == (
        Status.NOT_COMPLETE,
        True,
    )
    return found


def test_a_worker_that_keeps_time_limits_brings_deferred_rows_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    task = defer_by_limit(delays)
    assert is_deferred_until(task.error, task.expected_time)
    assert bring(delays, "other") == []
    assert bring(delays, "limited") == [task.id]
    assert delays.get(task).expected_time < task.expected_time


def test_a_rescheduled_row_keeps_its_time(delays: DelayTasks, timer: RecordingTimer) -> None:
    task = defer_by_limit(delays)
    delays.reschedule(task, 60)
    assert bring(delays, "limited") == []


def test_a_worker_that_keeps_no_time_limits_does_not_bring_them_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    delays.processor("limited", time_limit=60)(lambda body: None)
    task = defer_by_limit(delays)
    processes_of(runtime_of(delays).celery).queues = ["default"]
    celery_worker = SimpleNamespace(pool=None, hub=None, hostname="w", call_soon=lambda call: None)
    processes = processes_of(runtime_of(delays).celery)
    loop = WorkerRuntime(runtime_of(delays), processes, celery_worker, polls_table=False).sweep_loop
    processes.keeps_time_limits = False
    loop._bring_forward()
    assert delays.get(task).version == task.version
    processes.keeps_time_limits = True
    loop._bring_forward()
    assert delays.get(task).version > task.version


# A task that waits for its processor keeps its due time: `max_late` and lateness count from it


def deferred(world: World, tag: str = "new", **options: object) -> tuple[DelayedTask, datetime]:
    """Return a task that a worker without its processor has deferred, and its first due time."""
    task = world.schedule(tag, **options)
    due = task.expected_time
    world.run(task)
    found = world.read(task)
    assert (found.status, found.expected_time > due) == (Status.NOT_COMPLETE, True)
    return found, due


def make_due(world: World, task: DelayedTask) -> DelayedTask:
    """Make the deferred task due without a wait."""
    world.change(task, expected_time=world.now() - timedelta(milliseconds=10))
    return world.read(task)


def test_a_deferred_task_expires_by_its_first_due_time(world: World) -> None:
    task, _ = deferred(world, max_late="3s")
    world.change(task, due_time=world.now() - timedelta(seconds=5))
    world.delays.processor("new")(world.notes.append)
    world.run(make_due(world, task))
    assert world.read(task).status is Status.CANCELLED
    assert world.told("task.expired")[0]["late_s"] > 4
    assert world.notes == []


def test_each_deferral_keeps_the_first_due_time(world: World) -> None:
    task, due = deferred(world)
    for _ in range(2):
        world.run(make_due(world, task))
        assert world.read(task).due == due
    assert world.read(task).expected_time > due


def test_a_deferred_task_keeps_its_due_time_after_it_has_run(world: World) -> None:
    task, due = deferred(world)
    world.delays.processor("new")(world.notes.append)
    world.run(make_due(world, task))
    done = world.read(task)
    assert (done.status, done.due) == (Status.DONE, due)
    assert done.as_json()["due_time"] == due.isoformat()


def test_the_event_of_a_late_success_counts_from_the_first_due_time(make_world: MakeWorld) -> None:
    world = make_world(log_format="json")
    task, _ = deferred(world)
    world.change(task, due_time=world.now() - timedelta(seconds=5))
    world.delays.processor("new")(world.notes.append)
    world.run(make_due(world, task))
    assert world.told("task.done")[0]["late_s"] > 4


def test_the_error_about_a_taken_key_names_the_first_due_time_of_its_task(world: World) -> None:
    _, due = deferred(world, key="k")
    with pytest.raises(DuplicateTaskError, match=re.escape(f"due {due.isoformat()}")):
        world.schedule(key="k", tag="new")


def test_a_task_that_was_never_deferred_has_no_due_time_of_its_own(world: World) -> None:
    task = world.schedule()
    world.run(task)
    assert world.read(task).due_time is None
    assert world.read(task).due == task.expected_time


def test_a_limit_on_time_that_the_pool_cannot_keep_keeps_the_due_time(world: World) -> None:
    world.worker(keeps_time_limits=False)
    world.delays.processor("slow", time_limit=5)(world.notes.append)
    task, due = deferred(world, "slow")
    assert task.due == due


def test_a_lost_lease_keeps_the_due_time(world: World) -> None:
    """The attempt ended because of the worker, and the task did not request another due time."""

    def loses_its_lease(body: object) -> None:
        raise LeaseEndsError("its lease ends", 1)

    world.delays.processor("cut")(loses_its_lease)
    task = world.schedule("cut")
    world.run(task)
    assert world.read(task).due == task.expected_time


@pytest.mark.parametrize(
    "outcome", [Retry(after=60), Snooze(60), ValueError("no")], ids=["retry", "snooze", "error"]
)
def test_a_time_that_the_task_asked_for_is_its_new_due_time(world: World, outcome: object) -> None:
    task, _ = deferred(world)

    def end(body: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    world.delays.processor("new", retries=RetrySchedule("60s", jitter=0))(end)
    world.run(make_due(world, task))
    again = world.read(task)
    assert (again.status, again.due_time, again.due) == (
        Status.NOT_COMPLETE,
        None,
        again.expected_time,
    )
    assert again.due > world.now() + timedelta(seconds=50)


def test_rescheduling_a_deferred_task_gives_it_a_new_due_time(world: World) -> None:
    task, _ = deferred(world)
    at = world.now() + timedelta(hours=1)
    world.store.tasks.reschedule(task.id, at)
    assert (world.read(task).due_time, world.read(task).due) == (None, at)


def test_a_retried_task_has_a_new_due_time(world: World) -> None:
    task, _ = deferred(world)
    world.store.tasks.cancel(task.id)
    at = world.now() + timedelta(hours=1)
    world.store.tasks.rerun(task.id, at)
    assert world.read(task).due == at


def test_a_replaced_task_has_a_new_due_time(world: World) -> None:
    task, _ = deferred(world, key="k")
    at = world.now() + timedelta(hours=1)
    world.store.tasks.insert_keyed(
        replace(task, id=task.id + 1, expected_time=at, due_time=None), "replace"
    )
    assert (world.read(task).due_time, world.read(task).due) == (None, at)


def test_a_touch_beyond_the_next_try_is_a_new_due_time(world: World) -> None:
    [one, many] = [deferred(world)[0] for _ in range(2)]
    at = world.now() + timedelta(hours=1)
    assert world.store.touches.touch(one.id, at)
    assert world.store.touches.touch_many([many.id], at) == {many.id}
    for task in (one, many):
        assert (world.read(task).due_time, world.read(task).expected_time) == (None, at)


def test_a_touch_up_to_the_next_try_is_kept_by_a_worker_that_brings_the_task_forward(
    world: World,
) -> None:
    task, _ = deferred(world)
    at = world.now() + timedelta(seconds=3)
    assert task.expected_time > at
    assert world.store.touches.touch(task.id, at)
    assert (world.read(task).due, world.read(task).expected_time) == (at, task.expected_time)
    [entry] = world.store.deferred_rows.bring_forward(["new"], None, 600)
    moved = world.read(task)
    assert (moved.expected_time, moved.due) == (at, at), (
        "a touched task must not run before its new due time"
    )
    assert entry == Entry.of(moved)


def test_a_touch_never_makes_a_due_time_earlier(world: World) -> None:
    task, due = deferred(world)
    assert world.store.touches.touch(task.id, due - timedelta(hours=1))
    assert (world.read(task).due, world.read(task).expected_time) == (due, task.expected_time)


def test_a_worker_that_brings_a_task_forward_keeps_its_due_time(world: World) -> None:
    task, due = deferred(world)
    assert len(world.store.deferred_rows.bring_forward(["new"], None, 600)) == 1
    assert world.read(task).due == due
    assert world.read(task).expected_time < task.expected_time


def test_a_task_that_is_given_back_keeps_its_due_time(world: World) -> None:
    task, due = deferred(world)
    [claimed] = world.claim(make_due(world, task))
    assert claimed.due == due
    assert world.settle(claimed, "give_back")
    assert world.read(task).due == due


def test_an_overdue_task_is_overdue_everywhere_though_its_next_try_is_in_the_future(
    world: World,
) -> None:
    task, due = deferred(world)
    world.change(task, expected_time=world.now() + timedelta(minutes=5))
    world.schedule("later", delay=60)
    database, schema = world.store.database, world.store.schema
    overdue = OverdueRows(database, schema)
    assert overdue.count(0) == (1, due)
    assert overdue.count(10_000) == (0, None)
    assert overdue.groups(0, 20) == [("default", "new", "no_processor", 1, due)]
    [queue] = ConsoleQueries(world.store).queues(["default"], 0)
    assert (queue.waiting, queue.overdue) == (2, 1)
    live = LiveRows(database, schema).read(0)
    assert [row.due for row in live.waiting if row.tag == "new"] == [due]


def test_late_tasks_are_counted_by_queue_tag_and_cause(world: World) -> None:
    deferred(world)
    for tag, queue in (("note", "default"), ("note", "letters"), ("new", "default")):
        world.schedule(tag, queue=queue)
    overdue = OverdueRows(world.store.database, world.store.schema)
    found = {group[:4] for group in overdue.groups(0, 20)}
    assert found == {
        ("default", "new", "no_processor", 1),
        ("default", "new", None, 1),
        ("default", "note", None, 1),
        ("letters", "note", None, 1),
    }
    assert overdue.count(0).tasks == 4
    assert overdue.count(0, most=3).tasks == 3
    assert overdue.other_queues({"default"}, 0) == ["letters"]
    assert overdue.other_queues({"default"}, 10_000) == []
    assert len(overdue.groups(0, 2)) == 2


def test_a_shift_of_many_counts_from_the_due_time_and_not_from_the_next_try(
    world: World, delays: DelayTasks
) -> None:
    task = delays.schedule_delay("new", {}, 0)
    runner_of(delays).run([Entry.of(task)])
    world.advance(1)  # a shift leaves out what changes in its first millisecond
    before = delays.get(task)
    assert before.expected_time > before.due
    assert delays.bulk.reschedule(by=3600, tag="new").changed == 1
    moved = delays.get(task)
    assert (moved.due_time, moved.due) == (None, before.due + timedelta(hours=1))
