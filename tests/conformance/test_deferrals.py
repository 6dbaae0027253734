"""Deferred tasks and their due times, and versions of bodies, on every database."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest

import delaytasks as e
from delaytasks import DelayedTask, Retry, RetrySchedule, Snooze, Status
from tests.world import MakeWorld, World


def defer(world: World, count: int = 1, tag: str = "new", **options: Any) -> list[DelayedTask]:
    """Return tasks that a worker which cannot run them has deferred. They keep their due times."""
    tasks = [world.schedule(tag, n, **options) for n in range(count)]
    world.run(*tasks)
    found = [world.read(task) for task in tasks]
    assert [task.due for task in found] == [task.expected_time for task in tasks]
    assert {task.status for task in found} == {Status.NOT_COMPLETE}
    assert all(task.expected_time > world.now() for task in found)
    return found


def test_a_deferred_task_runs_at_its_next_try_on_a_worker_with_the_processor(world: World) -> None:
    began, tasks = world.now(), defer(world, 3)
    for task in tasks:
        at = datetime.fromisoformat(str(task.error).rpartition("next try at ")[2])
        assert at == task.expected_time > began + timedelta(seconds=4)
    world.delays.processor("new")(world.notes.append)
    done = [world.run_again(task) for task in tasks]
    assert [(task.status, task.due) for task in done] == [(Status.DONE, task.due) for task in tasks]
    assert world.notes == [0, 1, 2]


# A task that waits for its processor keeps its due time: `max_late` and lateness count from it


def test_a_deferred_task_expires_by_its_first_due_time(world: World) -> None:
    [task] = defer(world, max_late="3s")
    world.change(task, due_time=world.now() - timedelta(seconds=5))
    world.delays.processor("new")(world.notes.append)
    assert world.run_again(task).status is Status.CANCELLED
    assert world.told("task.expired")[0]["late_s"] > 4
    assert world.notes == []


def test_a_deferred_task_keeps_its_first_due_time_until_it_has_run(make_world: MakeWorld) -> None:
    world = make_world(log_format="json")
    [task] = defer(world, key="k")
    due = task.due - timedelta(seconds=100)
    world.change(task, due_time=due)
    for _ in range(2):
        deferred = world.run_again(task)
        assert deferred.due == due < deferred.expected_time
        assert world.told("task.no_processor")[-1]["next_try_s"] >= 10, "by its first due time"
        with pytest.raises(e.DuplicateTaskError, match=re.escape(f"due {due.isoformat()}")):
            world.schedule(key="k", tag="new")
    world.change(task, expected_time=due)
    [claimed] = world.claim(world.read(task))
    assert claimed.due == due
    assert world.settle(claimed, "give_back")
    assert world.read(task).due == due
    world.delays.processor("new")(world.notes.append)
    done = world.run_again(task)
    assert (done.status, done.due) == (Status.DONE, due)
    assert done.as_json()["due_time"] == due.isoformat()
    assert world.told("task.done")[0]["late_s"] > 4


OUTCOMES: list[Any] = [Retry(after=60), Snooze(60), ValueError("no")]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=["retry", "snooze", "error"])
def test_a_time_that_the_task_asked_for_is_its_new_due_time(world: World, outcome: Any) -> None:
    [task] = defer(world)

    def end(body: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    world.delays.processor("new", retries=RetrySchedule("60s", variation=0))(end)
    again = world.run_again(task)
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


@pytest.fixture
def overdue(world: World) -> DelayedTask:
    """A task that was due an hour ago, and whose next try is in six minutes."""
    world.run(task := world.put(due_s=-3600, tag="new"))
    return world.read(task)


def test_a_shift_of_many_counts_from_the_due_time_and_not_from_the_next_try(
    world: World, overdue: DelayedTask
) -> None:
    world.advance(1)  # a shift leaves out what changes in its first millisecond
    due = world.read(overdue).due + timedelta(hours=2)
    assert world.delays.bulk.reschedule(by=7200, tag="new").changed == 1
    assert (world.read(overdue).due_time, world.read(overdue).due) == (None, due)


def test_a_task_is_overdue_though_its_next_try_is_later(world: World, overdue: DelayedTask) -> None:
    world.serve("worker-1", "default")
    world.sweep()
    world.schedule("later", delay=60)
    state, due = world.state(), overdue.due
    assert (state.overdue, state.oldest) == (1, due)
    assert world.delays.check()[-1].first_due == due
    [late] = state.late
    assert (late.tag, late.oldest, late.reason.code) == ("new", due, "no_processor")
    groups = world.live()
    assert [(one.name, one.overdue) for one in groups["queue"]] == [("default", 1)]
    assert [(one.name, one.overdue) for one in groups["tag"]] == [("new", 1)]


# Bodies of newer versions wait for newer code, and a processor sees the version of each body


OLD, NEW = {"nr": 7}, {"order": 7, "currency": "EUR"}


@pytest.mark.parametrize("batch", [None, 5])
def test_a_processor_sees_the_version_of_each_body(world: World, batch: int | None) -> None:
    old, got = world.schedule("pay", OLD), list[Any]()

    @world.delays.processor("pay", body_version=3, batch=batch)
    def work(body: Any, task: Any) -> None:
        together = zip(body, task, strict=True) if batch else [(body, task)]
        got.extend((one.body_version, each) for each, one in together)

    second = world.schedule("pay", {"order": 7}, body_version=2)
    new = world.schedule("pay", NEW)
    assert [world.read(task).body_version for task in (old, second, new)] == [1, 2, 3]
    world.run(old, second, new)
    assert got == [(1, OLD), (2, {"order": 7}), (3, NEW)]


def test_a_newer_body_waits_for_newer_code_and_is_reported(world: World) -> None:
    world.delays.processor("pay", body_version=2)(world.notes.append)
    world.run(task := world.schedule("pay", NEW, body_version=3))
    waits = world.read(task)
    assert (waits.status, waits.runs, world.notes) == (Status.NOT_COMPLETE, 0, [])
    assert waits.due == task.due
    assert world.told("task.newer_body")
    world.schedule("pay", NEW, delay=60, body_version=2)
    [finding] = world.delays.check()
    assert list(finding.ids) == [task.id]
    assert finding.problem == "bodies of version 3, and its processor has 2"
    world.runtime.registry._processors.clear()  # as in a process with the new code
    world.delays.processor("pay", body_version=3)(world.notes.append)
    assert world.run_again(task).status is Status.DONE
    assert world.notes == [NEW]


def test_scheduling_checks_a_body_unless_newer_code_runs_it(world: World) -> None:
    def schema(body: dict[str, Any]) -> dict[str, Any]:
        assert "currency" in body
        return body

    schedule = partial(world.delays.schedule_delay, "pay", delay=60)
    world.delays.processor("pay", body_version=3, schema=schema)(lambda body: None)
    assert schedule(NEW).body_version == 3
    assert schedule(NEW, body_version=1).body_version == 1
    assert schedule("any", body_version=4).body_version == 4
    for version in (1, 3):
        with pytest.raises(e.BodyRefusedError):
            schedule(OLD, body_version=version)
