"""Each fact in the tables yields one reason why a task has not run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.model.text import DEFERRALS
from tests.world import MakeWorld, World

TAG, QUEUE, WORKER = "mail.send", "letters", "w1@host"


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    world = make_world(namespace="staging", _grace_s=30)
    world.serve(WORKER, QUEUE, tags=[TAG])
    world.sweep()
    return world


def put(world: World, status: Status = Status.NOT_COMPLETE, **columns: Any) -> DelayedTask:
    """Insert a task that is due since 2 s, and set columns of its row."""
    task = world.put(status, due_s=-2.0, tag=TAG, queue=QUEUE)
    if columns:
        world.change(task, **columns)
    return task


def codes(world: World, task: DelayedTask) -> list[str]:
    return [reason.code for reason in world.why(task)]


def says(world: World, task: DelayedTask, code: str, *parts: str) -> None:
    """Check the code of the only reason, and the parts of its text."""
    [reason] = world.why(task)
    assert reason.code == code
    for part in parts:
        assert part in reason.text


def ago(world: World, **time: float) -> datetime:
    return world.now() - timedelta(**time)


def at(instant: datetime) -> str:
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")


CASES: dict[str, Callable[[World], DelayedTask]] = {
    "due": put,
    "held": lambda w: put(w, Status.HELD),
    "lease_over": lambda w: put(w, Status.RUNNING, lease_until=ago(w, seconds=1)),
    "done": lambda w: (w.silence(), put(w, Status.DONE))[1],
    "failed": lambda w: put(w, Status.FAILED, error_stack="x"),
    "cancelled": lambda w: put(w, Status.CANCELLED),
}


def test_the_facts_decide_about_the_reason(world: World) -> None:
    assert {code: codes(world, make(world)) for code, make in CASES.items()} == {
        code: [code] for code in CASES
    }


def test_a_sweep_that_is_late_is_the_reason_of_overdue_tasks_only(world: World) -> None:
    late, new = put(world, expected_time=ago(world, minutes=1)), put(world)
    world.set_columns("sweeps", swept_at=ago(world, seconds=3))
    assert [codes(world, task) for task in (late, new)] == [["due"], ["due"]]
    world.set_columns("sweeps", swept_at=ago(world, minutes=1))
    says(world, late, "no_sweep", "the last was 1m")
    assert codes(world, new) == ["due"]


def test_what_an_operator_can_end_is_named_before_the_due_time(world: World) -> None:
    task = put(world, expected_time=(due := ago(world, seconds=-3650)))
    says(world, task, "future", f"is due at {at(due)}, in 1h, by the clock of the database.")
    world.silence()
    world.delays.policies.pause(tag=TAG)
    assert codes(world, task) == ["paused", "future", "no_worker"]


@pytest.mark.parametrize(("kind", "name"), [("tag", TAG), ("queue", QUEUE)])
def test_a_pause_names_its_author_and_what_ends_it(world: World, kind: str, name: str) -> None:
    policies, named = world.delays.policies, {kind: name}
    policies.pause(**named, actor="ann@desk")
    for task in (put(world), put(world, Status.HELD)):
        says(world, task, "paused", "by ann@desk since 20", f"delaytasks resume --{kind} {name}")
    policies.resume(**named)
    until = ago(world, hours=-1)
    policies.pause(**named, until=until)
    says(world, put(world), "paused", "Z (", f"), until {at(until)}.")


def test_a_full_limit_has_the_number_of_running_tasks(world: World) -> None:
    world.limit(TAG, concurrency=5)
    task = put(world)
    for _ in range(5):
        assert codes(world, task) == ["due"]
        put(world, Status.RUNNING, limit_key="customer-7")
    says(world, task, "limit", "used up (concurrency 5). Running: 5; in the waitlist: 0.")
    world.limit(TAG, concurrency=None, concurrency_per_key=2, rate=100, rate_period_s=1)
    world.change(task, limit_key="customer-7")
    assert not world.claim(world.read(task))
    said = "used up (of each key 2, rate 100/s). Running: 5; in the waitlist: 1."
    says(world, task, "limit", said)


def test_an_unserved_queue_names_what_workers_serve(world: World) -> None:
    task, start = put(world), "celery -A … worker -Q staging.letters"
    world.silence(90)
    says(world, task, "no_worker", "w1@host, which did, was seen 1m3")
    world.serve(WORKER, "default", "reports")
    served = "No live worker serves the queue letters; live workers serve default, reports"
    says(world, task, "no_worker", f"{served} (w1@host). Start one more worker: {start}")
    world.serve(WORKER)
    says(world, task, "no_worker", "no queue of delaytasks (w1@host). ", start)


def test_a_tag_that_no_worker_knows_is_named_with_its_queue_and_workers(world: World) -> None:
    task = put(world)
    world.serve(WORKER, QUEUE, tags=["other"])
    said = "queue letters has a processor for the tag mail.send (w1@host)"
    says(world, task, "no_processor", said)
    world.serve("w2@host", QUEUE, tags=[TAG])
    assert codes(world, task) == ["due"], "one worker that knows the tag is enough"
    world.serve("w2@host", QUEUE, tags=["delaytasks.celery"])
    assert codes(world, world.put(tag="celery:shop.remind", queue=QUEUE)) == ["due"]


@pytest.mark.parametrize(("code", "begin"), DEFERRALS.items())
def test_a_deferred_task_has_a_cause_and_a_next_try(world: World, begin: str, code: str) -> None:
    if code == "no_processor":  # the registry and the row both tell the reason
        world.serve(WORKER, QUEUE, tags=[])
    due, next_try = ago(world, seconds=121), ago(world, seconds=-30)
    task = put(world, expected_time=next_try, due_time=due, error_stack=f"{begin}x")
    says(world, task, code, f"tried: {begin}x. The next try is at {at(next_try)}, in ")


def test_tasks_that_occupy_all_processes_are_named(world: World) -> None:
    task = put(world, expected_time=ago(world, minutes=1))
    world.store.workers.report(WORKER, [QUEUE], "prefork", 3, 0, [TAG], busy=2)
    assert codes(world, task) == ["due"]
    world.store.workers.report(WORKER, [QUEUE], "prefork", 3, 0, [TAG], busy=3)
    none = f"No process of the workers of the queue {QUEUE} is free (of 3)"
    says(world, task, "busy", f"{none}: more tasks are due than they can run.")
    for _ in range(3):
        hanging = world.put(Status.RUNNING, tag="hang", queue=QUEUE)
        world.change(hanging, execution_time=ago(world, minutes=4))
    says(world, task, "busy", f"{none}: they have been busy for long with hang (3, the first")
    [late] = world.state().late
    assert (late.tag, late.reason.code) == (TAG, "busy")
