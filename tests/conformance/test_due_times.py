"""A task that waits for its processor keeps its due time: `expires` and lateness count from it."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from delaytasks import DelayTask, DelayTasks, Retry, RetrySchedule, Snooze, Status
from delaytasks.console.queries import ConsoleQueries
from delaytasks.core.errors import DuplicateTaskError
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.execution.executor import LeaseEndsError
from delaytasks.storage.state_queries import LiveRows
from delaytasks.storage.store import Store
from delaytasks.storage.sweep_queries import OverdueRows
from tests.recording import RecordingTimer, RunnerHarness


@pytest.fixture
def bench(store: Store) -> RunnerHarness:
    return RunnerHarness(store)


def deferred(
    bench: RunnerHarness, tag: str = "new", **options: object
) -> tuple[DelayTask, datetime]:
    """Return a task that a worker without its processor has deferred, and its first due time."""
    task = bench.schedule(tag, **options)
    due = task.expected_time
    bench.run(task)
    found = bench.now(task)
    assert (found.status, found.expected_time > due) == (Status.NOT_COMPLETE, True)
    return found, due


def make_due(bench: RunnerHarness, task: DelayTask) -> DelayTask:
    """Make the deferred task due without a wait."""
    bench.change(task, expected_time=bench.clock.now() - timedelta(milliseconds=10))
    return bench.now(task)


def test_a_deferred_task_expires_by_its_first_due_time(bench: RunnerHarness) -> None:
    task, _ = deferred(bench, expires="3s")
    bench.change(task, due_time=bench.clock.now() - timedelta(seconds=5))
    bench.registry.processor("new")(bench.ran.append)
    bench.run(make_due(bench, task))
    assert bench.now(task).status is Status.CANCELLED
    assert bench.named("task.expired")[0]["late_s"] > 4
    assert bench.ran == []


def test_each_deferral_keeps_the_first_due_time(bench: RunnerHarness) -> None:
    task, due = deferred(bench)
    for _ in range(2):
        bench.run(make_due(bench, task))
        assert bench.now(task).due == due
    assert bench.now(task).expected_time > due


def test_a_deferred_task_keeps_its_due_time_after_it_has_run(bench: RunnerHarness) -> None:
    task, due = deferred(bench)
    bench.registry.processor("new")(bench.ran.append)
    bench.run(make_due(bench, task))
    done = bench.now(task)
    assert (done.status, done.due) == (Status.DONE, due)
    assert done.as_json()["due_time"] == due.isoformat()


def test_the_event_of_a_late_success_counts_from_the_first_due_time(store: Store) -> None:
    bench = RunnerHarness(store, log_successes=True)
    task, _ = deferred(bench)
    bench.change(task, due_time=bench.clock.now() - timedelta(seconds=5))
    bench.registry.processor("new")(bench.ran.append)
    bench.run(make_due(bench, task))
    assert bench.named("task.done")[0]["late_s"] > 4


def test_the_error_about_a_taken_key_names_the_first_due_time_of_its_task(
    bench: RunnerHarness,
) -> None:
    _, due = deferred(bench, key="k")
    with pytest.raises(DuplicateTaskError, match=re.escape(f"due {due.isoformat()}")):
        bench.schedule(key="k", tag="new")


def test_a_task_that_was_never_deferred_has_no_due_time_of_its_own(bench: RunnerHarness) -> None:
    task = bench.schedule()
    bench.run(task)
    assert bench.now(task).due_time is None
    assert bench.now(task).due == task.expected_time


def test_a_limit_on_time_that_the_pool_cannot_keep_keeps_the_due_time(store: Store) -> None:
    bench = RunnerHarness(store)
    bench.runner = bench.make_runner(keeps_time_limits=False)
    bench.registry.processor("slow", time_limit=5)(bench.ran.append)
    task, due = deferred(bench, "slow")
    assert task.due == due


def test_a_lost_lease_keeps_the_due_time(bench: RunnerHarness) -> None:
    """The attempt ended because of the worker, and the task did not request another due time."""

    def loses_its_lease(body: object) -> None:
        raise LeaseEndsError("its lease ends", 1)

    bench.registry.processor("cut")(loses_its_lease)
    task = bench.schedule("cut")
    bench.run(task)
    assert bench.now(task).due == task.expected_time


@pytest.mark.parametrize(
    "outcome", [Retry(after=60), Snooze(60), ValueError("no")], ids=["retry", "snooze", "error"]
)
def test_a_time_that_the_task_asked_for_is_its_new_due_time(
    bench: RunnerHarness, outcome: object
) -> None:
    task, _ = deferred(bench)

    def end(body: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    bench.registry.processor("new", retries=RetrySchedule("60s", jitter=0))(end)
    bench.run(make_due(bench, task))
    again = bench.now(task)
    assert (again.status, again.due_time, again.due) == (
        Status.NOT_COMPLETE,
        None,
        again.expected_time,
    )
    assert again.due > bench.clock.now() + timedelta(seconds=50)


def test_rescheduling_a_deferred_task_gives_it_a_new_due_time(bench: RunnerHarness) -> None:
    task, _ = deferred(bench)
    at = bench.clock.now() + timedelta(hours=1)
    bench.store.tasks.reschedule(task.id, at)
    assert (bench.now(task).due_time, bench.now(task).due) == (None, at)


def test_a_retried_task_has_a_new_due_time(bench: RunnerHarness) -> None:
    task, _ = deferred(bench)
    bench.store.tasks.cancel(task.id)
    at = bench.clock.now() + timedelta(hours=1)
    bench.store.tasks.rerun(task.id, at)
    assert bench.now(task).due == at


def test_a_replaced_task_has_a_new_due_time(bench: RunnerHarness) -> None:
    task, _ = deferred(bench, key="k")
    at = bench.clock.now() + timedelta(hours=1)
    bench.store.tasks.insert_keyed(
        replace(task, id=task.id + 1, expected_time=at, due_time=None), "replace"
    )
    assert (bench.now(task).due_time, bench.now(task).due) == (None, at)


def test_a_touch_beyond_the_next_try_is_a_new_due_time(bench: RunnerHarness) -> None:
    [one, many] = [deferred(bench)[0] for _ in range(2)]
    at = bench.clock.now() + timedelta(hours=1)
    assert bench.store.touches.touch(one.id, at)
    assert bench.store.touches.touch_many([many.id], at) == {many.id}
    for task in (one, many):
        assert (bench.now(task).due_time, bench.now(task).expected_time) == (None, at)


def test_a_touch_up_to_the_next_try_is_kept_by_a_worker_that_brings_the_task_forward(
    bench: RunnerHarness,
) -> None:
    task, _ = deferred(bench)
    at = bench.clock.now() + timedelta(seconds=3)
    assert task.expected_time > at
    assert bench.store.touches.touch(task.id, at)
    assert (bench.now(task).due, bench.now(task).expected_time) == (at, task.expected_time)
    [entry] = bench.store.deferred_rows.bring_forward(["new"], None, 600)
    moved = bench.now(task)
    assert (moved.expected_time, moved.due) == (at, at), (
        "a touched task must not run before its new due time"
    )
    assert entry == bench.entry(moved)


def test_a_touch_never_makes_a_due_time_earlier(bench: RunnerHarness) -> None:
    task, due = deferred(bench)
    assert bench.store.touches.touch(task.id, due - timedelta(hours=1))
    assert (bench.now(task).due, bench.now(task).expected_time) == (due, task.expected_time)


def test_a_worker_that_brings_a_task_forward_keeps_its_due_time(bench: RunnerHarness) -> None:
    task, due = deferred(bench)
    assert len(bench.store.deferred_rows.bring_forward(["new"], None, 600)) == 1
    assert bench.now(task).due == due
    assert bench.now(task).expected_time < task.expected_time


def test_a_task_that_is_given_back_keeps_its_due_time(bench: RunnerHarness) -> None:
    task, due = deferred(bench)
    [claimed] = bench.claims.claim([bench.entry(make_due(bench, task))])
    assert claimed.due == due
    assert bench.claims.settle([Settlement(claimed, "give_back")]) == {task.id}
    assert bench.now(task).due == due


def test_an_overdue_task_is_overdue_everywhere_though_its_next_try_is_in_the_future(
    bench: RunnerHarness,
) -> None:
    task, due = deferred(bench)
    bench.change(task, expected_time=bench.clock.now() + timedelta(minutes=5))
    bench.schedule("later", delay=60)
    database, schema = bench.store.database, bench.store.schema
    overdue = OverdueRows(database, schema)
    assert overdue.count(0) == (1, due)
    assert overdue.count(10_000) == (0, None)
    assert overdue.groups(0, 20) == [("default", "new", "no_processor", 1, due)]
    [queue] = ConsoleQueries(bench.store).queues(["default"], 0)
    assert (queue.waiting, queue.overdue) == (2, 1)
    live = LiveRows(database, schema).read(0)
    assert [row.due for row in live.waiting if row.tag == "new"] == [due]


def test_late_tasks_are_counted_by_queue_tag_and_cause(bench: RunnerHarness) -> None:
    deferred(bench)
    for tag, queue in (("note", "default"), ("note", "letters"), ("new", "default")):
        bench.schedule(tag, queue=queue)
    overdue = OverdueRows(bench.store.database, bench.store.schema)
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
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    task = delays.schedule_delay("new", {}, 0)
    delays.runner().run([Entry.of(task)])
    before = delays.get(task)
    assert before.expected_time > before.due
    assert delays.reschedule_many(by=3600, tag="new").changed == 1
    moved = delays.get(task)
    assert (moved.due_time, moved.due) == (None, before.due + timedelta(hours=1))
