"""Why a task has not run, on every database."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from delaytasks import DelayedTask, DelayTasks, Retry, Status
from delaytasks.cli.status import read_deployment
from delaytasks.model.clock import to_us
from delaytasks.operate.health import verdict_of
from delaytasks.run.runner import FailureReason
from tests.world import MainProcess, MakeWorld, World
from tests.world.recording import explain

# The explanation of a task names what the database, the broker and the timer report


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A world with a worker that serves all queues, and says nothing of its tags."""
    world = make_world()
    world.serve("w1", "*")
    world.sweep()
    return world


def codes(delays: DelayTasks, task: DelayedTask) -> list[str]:
    reasons = explain(delays, task)
    assert json.dumps([each._asdict() for each in reasons]), "the result is JSON"
    return [reason.code for reason in reasons]


def test_the_task_of_a_recurring_schedule_names_the_schedule(delays: DelayTasks) -> None:
    delays.recurring.set("nightly", "report.send", cron="0 2 * * *")
    task = delays.recurring.schedule_now("nightly")
    assert codes(delays, task) == ["due", "recurring"]
    reason = explain(delays, task)[-1]
    assert reason.sentence.startswith("It is a task of the recurring schedule nightly (0 2 * * *)")
    delays.recurring.pause("nightly")
    assert explain(delays, task)[-1].sentence.endswith("which is paused.")
    other = delays.schedule_delay("report.send", {}, 60, key="weekly@2030-01-01T00:00:00Z")
    assert codes(delays, other) == ["future"], "the key looks like that of an unknown schedule"


# -- why a task began late ------------------------------------------------------------------------


def late(world: World, **row: Any) -> DelayedTask:
    """Return a task that is ten seconds late and was scheduled before."""
    return world.put(create_time=world.now() - timedelta(minutes=1), **row)


def late_start(world: World, task: DelayedTask) -> tuple[str, str] | None:
    assert world.read(task).status is Status.DONE
    return world.read(task).late_start


def test_a_late_start_says_what_brought_the_task(world: World) -> None:
    in_time, retried = world.schedule(), late(world, tag="retried")
    entry, drained, new = late(world), late(world), world.put()
    world.delays.processor("retried")(lambda _, task: Retry("1h") if task.runs == 1 else None)
    world.run(in_time, retried, entry, new)
    world.drain()
    assert late_start(world, in_time) is None
    assert late_start(world, entry) == world.read(retried).late_start == ("entry", "unnoticed")
    assert late_start(world, new) == ("entry", "scheduled_late")
    assert late_start(world, drained) == ("drain", "unnoticed")
    assert world.why(drained)[0].text.endswith(
        ", 10s after it was due, because no message reached a worker in time (a drain of the queue "
        "found it)."
    )
    world.change(retried, expected_time=world.now())
    world.run(world.read(retried))
    assert late_start(world, retried) is None, "the last run decides"
    assert " late" not in world.why(retried)[0].text


def hold_for_a_while(world: World, task: DelayedTask) -> None:
    world.delays.policies.pause(queue="paused")
    assert world.hold(task.id) == 1
    world.delays.policies.resume(queue="paused")
    world.release(task.id)


def test_a_late_start_names_what_the_row_has_met_last(world: World) -> None:
    paused, lapsed = late(world, queue="paused"), late(world)
    deferred = late(world, tag="later", queue="paused")
    for task in (paused, deferred):
        hold_for_a_while(world, task)
    [claimed] = world.claim(world.read(paused))
    assert world.settle(claimed, "give_back")
    world.claim(lapsed)
    world.lapse(lapsed)
    world.run(world.read(deferred))
    for task in (paused, deferred):
        assert world.read(task).late_start is None, "it has not run"
    world.delays.processor("later")(world.notes.append)
    world.change(deferred, expected_time=world.now())  # its due time says that it is late
    world.delays.processor("limited")(world.notes.append)
    world.limit("limited", concurrency=1)
    running, waiting = late(world, tag="limited", due_s=-11), late(world, tag="limited")
    world.claim(running, waiting)
    world.limit("limited", concurrency=2)
    world.drain("paused")
    world.drain()
    world.worker().run_waitlist("limited", 1, 0)
    assert late_start(world, paused) == ("drain", "held"), "it was only given back meanwhile"
    assert late_start(world, lapsed) == ("drain", "lease_lost")
    assert late_start(world, deferred) == ("drain", "deferred")
    assert late_start(world, waiting) == ("waitlist", "held")


def start_worker(main: MainProcess) -> None:
    with mock.patch.object(main.runtime, "loops", []):
        main.runtime.start()


def keep_busy(main: MainProcess) -> None:
    """Let each process have a chunk, and more entries wait until one ends."""
    for _ in range(3):
        main.take(1)
    main.end()


def lose_the_database(main: MainProcess) -> None:
    main.take(1)
    main.end(error="no answer", reason=FailureReason.UNAVAILABLE)


def lose_the_broker(main: MainProcess) -> None:
    main.runtime.service_watch.mark_broker_lost()
    main.runtime.watch()


HAPPENS = {"no_worker": start_worker, "busy": keep_busy}
HAPPENS |= {"database": lose_the_database, "broker": lose_the_broker}


@pytest.mark.parametrize(("reason", "happens"), HAPPENS.items())
def test_a_late_start_names_what_kept_its_worker_from_it(
    world: World, reason: str, happens: Callable[[MainProcess], None]
) -> None:
    for ago_s, expected in ((20, "unnoticed"), (0, reason)):
        main, task = MainProcess(world), late(world)
        now_us = to_us(world.now()) - ago_s * 1_000_000
        with mock.patch.object(main.clock, "now_us", lambda now_us=now_us: now_us):
            happens(main)
        main.close()
        world.worker(f"{ago_s}", memory=main.processes.memory).run(task)
        assert late_start(world, task) == ("entry", expected)


def test_late_starts_are_counted_for_the_verdict(world: World) -> None:
    main = MainProcess(world)
    tasks = [world.put(), late(world), late(world)]
    main.write_counts(world.run(*tasks, world.schedule()))
    main.close()
    [problem] = verdict_of(read_deployment(world.delays)).problems
    assert problem.text.startswith("3 runs of the last 15 minutes began late: 2 because no message")
