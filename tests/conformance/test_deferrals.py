"""Deferred tasks and their due times, on every database."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from delaytasks import DelayedTask, DuplicateTaskError, Retry, RetrySchedule, Snooze, Status
from tests.world import LeaseEndsError, MakeWorld, World


def defer(world: World, count: int = 1, tag: str = "new", **options: Any) -> list[DelayedTask]:
    """Return tasks that a worker which cannot run them has deferred. They keep their due times."""
    tasks = [world.schedule(tag, n, **options) for n in range(count)]
    world.run(*tasks)
    found = [world.read(task) for task in tasks]
    assert [task.due for task in found] == [task.expected_time for task in tasks]
    assert {task.status for task in found} == {Status.NOT_COMPLETE}
    assert all(task.expected_time > world.now() for task in found)
    return found


def run_when_due(world: World, task: DelayedTask) -> DelayedTask:
    """Run a deferred task at its next try."""
    world.change(task, expected_time=world.now() - timedelta(milliseconds=10))
    world.run(world.read(task))
    return world.read(task)


def test_a_deferred_task_runs_at_its_next_try_on_a_worker_with_the_processor(world: World) -> None:
    tasks = defer(world, 3)
    world.delays.processor("new")(world.notes.append)
    done = [run_when_due(world, task) for task in tasks]
    assert [(task.status, task.due) for task in done] == [(Status.DONE, task.due) for task in tasks]
    assert world.notes == [0, 1, 2]


def test_a_call_for_all_tasks_of_the_tag_runs_deferred_ones_immediately(world: World) -> None:
    tasks = defer(world, 3)
    world.delays.processor("new")(world.notes.append)
    world.delays.bulk.reschedule(at=world.now(), tag="new")
    world.deliver()
    assert world.statuses(tasks) == ["DONE"] * 3


def test_a_touch_is_kept_beside_a_later_next_try(world: World, overdue: DelayedTask) -> None:
    assert world.delays.touch(overdue, 180)
    touched = world.read(overdue)
    assert overdue.due < touched.due < touched.expected_time == overdue.expected_time
    assert world.delays.touch(overdue, 60)
    assert world.read(overdue).due == touched.due, "never earlier"


def test_the_error_of_a_row_says_when_it_is_tried_again(world: World) -> None:
    began = world.now()
    [task] = defer(world)
    assert task.error is not None
    at = datetime.fromisoformat(task.error.rpartition("next try at ")[2])
    assert at == task.expected_time > began + timedelta(seconds=4)


# A task that waits for its processor keeps its due time: `max_late` and lateness count from it


def test_a_deferred_task_expires_by_its_first_due_time(world: World) -> None:
    [task] = defer(world, max_late="3s")
    world.change(task, due_time=world.now() - timedelta(seconds=5))
    world.delays.processor("new")(world.notes.append)
    assert run_when_due(world, task).status is Status.CANCELLED
    assert world.told("task.expired")[0]["late_s"] > 4
    assert world.notes == []


def test_a_deferred_task_keeps_its_first_due_time_until_it_has_run(make_world: MakeWorld) -> None:
    world = make_world(log_format="json")
    [task] = defer(world)
    due = task.due - timedelta(seconds=5)
    world.change(task, due_time=due)
    for _ in range(2):
        deferred = run_when_due(world, task)
        assert deferred.due == due < deferred.expected_time
    world.change(task, expected_time=due)
    [claimed] = world.claim(world.read(task))
    assert claimed.due == due
    assert world.settle(claimed, "give_back")
    assert world.read(task).due == due
    world.delays.processor("new")(world.notes.append)
    done = run_when_due(world, task)
    assert (done.status, done.due) == (Status.DONE, due)
    assert done.as_json()["due_time"] == due.isoformat()
    assert world.told("task.done")[0]["late_s"] > 4


def test_the_error_about_a_taken_key_names_the_first_due_time_of_its_task(world: World) -> None:
    [task] = defer(world, key="k")
    with pytest.raises(DuplicateTaskError, match=re.escape(f"due {task.due.isoformat()}")):
        world.schedule(key="k", tag="new")


def test_a_lost_lease_keeps_the_due_time(world: World) -> None:
    """The attempt ended because of the worker, and the task did not request another due time."""
    world.run(done := world.schedule())
    assert (world.read(done).due_time, world.read(done).due) == (None, done.expected_time)

    def loses_its_lease(body: object) -> None:
        raise LeaseEndsError("its lease ends", 1)

    world.delays.processor("cut")(loses_its_lease)
    world.run(task := world.schedule("cut"))
    assert world.read(task).due == task.expected_time


@pytest.mark.parametrize(
    "outcome", [Retry(after=60), Snooze(60), ValueError("no")], ids=["retry", "snooze", "error"]
)
def test_a_time_that_the_task_asked_for_is_its_new_due_time(world: World, outcome: object) -> None:
    [task] = defer(world)

    def end(body: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    world.delays.processor("new", retries=RetrySchedule("60s", variation=0))(end)
    again = run_when_due(world, task)
    assert (again.status, again.due_time) == (Status.NOT_COMPLETE, None)
    assert again.due == again.expected_time > world.now() + timedelta(seconds=50)


CALLS: dict[str, Callable[[World, DelayedTask], object]] = {
    "reschedule": lambda world, task: world.delays.reschedule(task, "1h"),
    "rerun": lambda world, task: (world.cancel(task), world.delays.rerun(task.id, "1h")),
    "replace": lambda world, task: world.schedule(
        "new", 1, 3600, key=task.key, on_conflict="replace"
    ),
    "touch": lambda world, task: world.delays.touch(task, "1h"),
    "touch many": lambda world, task: world.delays.touch([task], "1h"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_with_a_later_time_gives_a_deferral_a_new_due_time(world: World, call: Any) -> None:
    [task] = defer(world, key="k")
    call(world, task)
    again = world.read(task)
    assert again.due_time is None
    assert again.due == again.expected_time > world.now() + timedelta(minutes=55)


def test_a_shift_of_many_counts_from_the_due_time_and_not_from_the_next_try(world: World) -> None:
    [task] = defer(world)
    world.advance(1)  # a shift leaves out what changes in its first millisecond
    before = world.read(task)
    assert before.expected_time > before.due
    assert world.delays.bulk.reschedule(by=3600, tag="new").changed == 1
    moved = world.read(task)
    assert (moved.due_time, moved.due) == (None, before.due + timedelta(hours=1))


@pytest.fixture
def overdue(world: World) -> DelayedTask:
    """A task that was due an hour ago, and whose next try is in six minutes."""
    world.run(task := world.put(due_s=-3600, tag="new"))
    return world.read(task)


def test_a_task_is_overdue_though_its_next_try_is_later(world: World, overdue: DelayedTask) -> None:
    """Late tasks are counted by queue and tag, and explained by one of them."""
    world.serve("worker-1", "default")
    world.sweep()
    world.schedule("later", delay=60)
    state, due = world.state(), overdue.due
    assert (state.overdue, state.oldest) == (1, due)
    [late] = state.late
    assert (late.tag, late.oldest, late.reason.code) == ("new", due, "no_processor")
    [queue] = world.live().queues
    assert (queue.soon, queue.overdue) == (1, 1)
    assert [(one.name, one.overdue) for one in world.live().tags if one.overdue] == [("new", 1)]
    world.serve("worker-1", "default", "letters")
    for tag, queue_name in (("note", "default"), ("note", "letters"), ("new", "default")):
        world.put(due_s=-100, tag=tag, queue=queue_name)
    late_rows = {(one.queue, one.tag, one.tasks, one.reason.code) for one in world.state().late}
    assert late_rows == {
        ("default", "new", 2, "no_processor"),
        ("default", "note", 1, "due"),
        ("letters", "note", 1, "due"),
    }
