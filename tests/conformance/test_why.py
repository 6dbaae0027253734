"""Why a task has not run, on every database."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
from celery import Celery
from celery.exceptions import WorkerShutdown
from sqlalchemy import select

from delaytasks import DelayedTask, DelayTasks, Retry, Status
from delaytasks.cli.status import read_deployment
from delaytasks.model.clock import to_us
from delaytasks.operate.health import verdict_of
from delaytasks.operate.metrics import run_metrics
from delaytasks.run.runner import FailureReason
from tests.services import free_port
from tests.world import RUNNING, MainProcess, MakeWorld, World
from tests.world.recording import delays_on, explain, record_action

#: More tags than the registry takes from a worker.
TOO_MANY = [f"tag.{number}" for number in range(16_384)]
# The facts that explain why a task has not run, as each database reports them


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    world = make_world()
    world.serve("w1", "default", tags=["note", "limited"])
    world.sweep()
    return world


def fact_codes(world: World, task: DelayedTask) -> list[str]:
    return [reason.code for reason in world.why(task)]


def tags_of_worker(world: World) -> set[str] | None:
    [row] = world.rows(select(world.table("workers").c.tags))
    return None if row.tags is None else set(json.loads(row.tags))


def test_rows_with_invalid_values_have_reasons_too(world: World) -> None:
    task = world.schedule()
    for values in (RUNNING | {"worker": ""}, {"status": 5, "limit_key": "x" * 255}):
        world.change(task, **values)
        assert fact_codes(world, task)


def test_a_worker_publishes_its_current_tags_unless_they_are_too_many(
    world: World, make_world: MakeWorld
) -> None:
    assert tags_of_worker(world) == {"note", "limited"}
    world.store.workers.remove("w1")
    world.serve("w1", "default", tags=["other"])
    assert tags_of_worker(world) == {"other"}
    make_world().serve("w1", "default", tags=TOO_MANY)  # it has started again
    assert tags_of_worker(world) is None
    assert fact_codes(world, world.schedule()) == ["due"], "what is not known is no reason"


# The explanation of a task names what the database, the broker and the timer report


def codes(delays: DelayTasks, task: DelayedTask) -> list[str]:
    reasons = explain(delays, task)
    assert json.dumps([each._asdict() for each in reasons]), "the result is JSON"
    return [reason.code for reason in reasons]


@pytest.fixture
def served(world: World) -> World:
    """A world with a worker that serves all queues, and says nothing of its tags."""
    world.serve("w2", "*")
    world.store.workers.remove("w1")
    return world


def test_a_task_of_a_bulk_cancel_names_the_actor_and_the_audit_entry(delays: DelayTasks) -> None:
    by_ann, by_bob = delays.schedule_delay("a", {}, 60), delays.schedule_delay("b", {}, 60)
    [run] = delays.bulk.cancel(tag="a", actor="ann").runs
    delays.bulk.cancel(tag="b", actor="bob")
    [reason] = explain(delays, by_ann)
    assert f"by ann (entry {run} of the log)" in reason.sentence
    assert reason.name == "ann"
    assert explain(delays, by_bob)[0].name == "bob"


def test_a_task_that_a_person_cancelled_alone_names_the_actor(delays: DelayTasks) -> None:
    mine, other = delays.schedule_delay("a", {}, 60), delays.schedule_delay("a", {}, 60)
    record = partial(record_action, delays)
    for task in (mine, other):
        delays.cancel(task)
    record("cancel_task", {"id": str(mine.id)}, "ann")
    record("cancel_task", {"id": str(mine.id)}, "bob", is_refused=True)
    record("cancel_task", {"id": f"{mine.id}0"}, "bob")
    record("rerun_task", {"id": str(mine.id)}, "bob")
    [entry] = [entry for entry in delays.bulk.log() if entry.actor == "ann"]
    [reason] = explain(delays, mine)
    assert f"by ann (entry {entry.id} of the log)" in reason.sentence
    assert reason.name == "ann"
    assert explain(delays, other)[0].name == ""


@pytest.mark.usefixtures("served")
def test_the_task_of_a_recurring_schedule_names_the_schedule(delays: DelayTasks) -> None:
    delays.recurring.set("nightly", "report.send", cron="0 2 * * *")
    task = delays.recurring.schedule_now("nightly")
    assert codes(delays, task) == ["due", "recurring"]
    reason = explain(delays, task)[-1]
    assert reason.sentence.startswith("It is a task of the recurring schedule nightly (0 2 * * *)")
    delays.recurring.pause("nightly")
    assert explain(delays, task)[-1].sentence.endswith("which is paused.")
    delays.recurring.set("often", "report.send", every="5m")
    of_interval = explain(delays, delays.recurring.schedule_now("often"))[-1]
    assert "recurring schedule often (every 5m)" in of_interval.sentence
    other = delays.schedule_delay("report.send", {}, 60, key="weekly@2030-01-01T00:00:00Z")
    assert codes(delays, other) == ["future"], "the key looks like that of an unknown schedule"


@pytest.mark.usefixtures("served")
def test_a_broker_that_is_down_is_named_for_a_task_that_is_due_soon(database_url: str) -> None:
    broker = f"redis://127.0.0.1:{free_port()}/0"
    app = Celery("test", broker=broker, set_as_current=False)
    delays = DelayTasks(app, database_url, table_prefix="s_", arm="inline")
    assert codes(delays, delays.schedule_delay("a", {}, 5)) == ["future", "broker_down"]
    assert codes(delays, delays.schedule_delay("a", {}, 3600)) == ["future"], "it is not needed yet"
    delays.close()


@pytest.mark.usefixtures("served")
def test_a_redis_timer_that_is_down_is_named(database_url: str) -> None:
    redis = f"redis://127.0.0.1:{free_port()}/0"
    options = {"timer": redis, "arm": "inline"}
    delays = delays_on(database_url, table_prefix="s_", **options)
    assert codes(delays, delays.schedule_delay("a", {}, 5)) == ["future", "timer_down"]
    delays.close()


def test_a_waitlist_names_the_limit_and_its_length(delays: DelayTasks, served: World) -> None:
    served.limit("mail", concurrency=1)
    delays.processor("mail")(lambda body: None)
    tasks = [delays.schedule_delay("mail", {}, 0) for _ in range(4)]
    served.claim(*tasks)
    held = [task for task in tasks if delays.get(task).status.name == "HELD"]
    [reason] = explain(delays, held[0])
    assert "(concurrency 1). Running: 1; in the waitlist: 3." in reason.sentence


def test_an_expired_task_says_that_it_will_be_cancelled(delays: DelayTasks, served: World) -> None:
    task = delays.schedule_delay("a", {}, 0, max_late=0.001)
    served.change(task, expected_time=task.expected_time - timedelta(minutes=1))
    assert codes(delays, task) == ["due", "expired"]


# -- why a task began late ------------------------------------------------------------------------


def late(world: World, **row: Any) -> DelayedTask:
    """Return a task that is ten seconds late and was scheduled before."""
    return world.put(create_time=world.now() - timedelta(minutes=1), **row)


def late_start(world: World, task: DelayedTask) -> tuple[str, str] | None:
    assert world.read(task).status is Status.DONE
    return world.read(task).late_start


def test_a_task_that_began_in_time_has_no_late_start(world: World) -> None:
    in_time, retried = world.schedule(), late(world, tag="retried")
    world.delays.processor("retried")(lambda _, task: Retry("1h") if task.runs == 1 else None)
    world.run(in_time, retried)
    assert late_start(world, in_time) is None
    assert world.read(retried).late_start == ("entry", "unnoticed")
    world.change(retried, expected_time=world.now())
    world.run(world.read(retried))
    assert late_start(world, retried) is None, "the last run decides"
    assert " late" not in world.why(retried)[0].text


def test_a_late_start_says_what_brought_the_task(world: World) -> None:
    entry, drained, new = late(world), late(world), world.put()
    world.run(entry, new)
    world.drain()
    assert late_start(world, entry) == ("entry", "unnoticed")
    assert late_start(world, new) == ("entry", "scheduled_late")
    assert late_start(world, drained) == ("drain", "unnoticed")
    assert world.why(drained)[0].text.endswith(
        ", 10s after it was due, because no message reached a worker in time (a drain of the queue "
        "found it)."
    )


def next_try_is_due(world: World, deferred: DelayedTask) -> None:
    world.change(deferred, expected_time=world.now() - timedelta(seconds=2))


def test_a_late_start_names_what_the_row_has_met(world: World) -> None:
    paused, lapsed = late(world, queue="paused"), late(world)
    world.delays.policies.pause(queue="paused")
    assert world.hold(paused.id) == 1
    world.delays.policies.resume(queue="paused")
    world.release(paused.id)
    world.claim(lapsed)
    world.lapse(lapsed)
    deferred = late(world, tag="later")
    world.run(deferred)
    world.delays.processor("later")(world.notes.append)
    next_try_is_due(world, deferred)
    world.delays.processor("limited")(world.notes.append)
    world.limit("limited", concurrency=1)
    running, waiting = late(world, tag="limited", due_s=-11), late(world, tag="limited")
    world.claim(running, waiting)
    world.limit("limited", concurrency=2)
    world.drain("paused")
    world.drain()
    world.worker().run_waitlist("limited", 1, 0)
    assert late_start(world, paused) == ("drain", "held")
    assert late_start(world, lapsed) == ("drain", "lease_lost")
    assert late_start(world, deferred) == ("drain", "deferred")
    assert late_start(world, waiting) == ("waitlist", "held")


def pause(world: World, task: DelayedTask) -> None:
    world.delays.policies.pause(queue="paused")
    assert world.hold(task.id) == 1


def resume(world: World, task: DelayedTask) -> None:
    world.delays.policies.resume(queue="paused")
    world.release(task.id)


def reschedule(world: World, task: DelayedTask) -> None:
    resume(world, task)
    world.delays.reschedule(task.id, delay=3600)


def rerun_many(world: World, task: DelayedTask) -> None:
    world.cancel(task)
    world.delays.policies.resume(queue="paused")
    assert world.delays.bulk.rerun(ids=[task.id], status="CANCELLED").changed == 1


@pytest.mark.parametrize(
    ("due_s", "change"), [(3600, resume), *((-10, each) for each in (reschedule, rerun_many))]
)
def test_a_hold_before_the_due_time_is_no_reason(
    world: World, due_s: float, change: Callable[[World, DelayedTask], None]
) -> None:
    task = world.schedule(delay=3600, key="k", queue="paused")
    world.change(task, expected_time=world.now() + timedelta(seconds=due_s))
    pause(world, task)
    change(world, task)
    ago = {"expected_time": timedelta(seconds=10), "create_time": timedelta(minutes=1)}
    world.change(task, **{column: world.now() - each for column, each in ago.items()})
    world.drain("paused")
    assert late_start(world, task) == ("drain", "unnoticed")


def test_a_held_row_that_is_given_back_was_held(world: World) -> None:
    @world.delays.processor("ends")
    def end(body: object) -> None:
        raise WorkerShutdown

    row = {"queue": "paused"}
    late(world, tag="ends", due_s=-11, **row)
    held, deferred = late(world, **row), late(world, tag="later", **row)
    for task in (held, deferred):
        pause(world, task)
        resume(world, task)
    with pytest.raises(WorkerShutdown):
        world.drain("paused")
    for task in (held, deferred):
        left = world.read(task)
        assert (left.status, left.version > task.version) == (Status.NOT_COMPLETE, True)
        assert left.late_start is None, "it has not run"
    world.drain("paused")
    world.delays.processor("later")(world.notes.append)
    next_try_is_due(world, deferred)
    world.drain("paused")
    assert late_start(world, held) == ("drain", "held")
    assert late_start(world, deferred) == ("drain", "deferred"), "the last reason counts"


def test_a_late_start_that_a_newer_version_noted_is_unknown(world: World) -> None:
    world.run(task := late(world))
    for late_by, names in ((19, ("entry", "unknown")), (41, ("unknown", "busy"))):
        world.change(task, late_by=late_by)
        assert late_start(world, task) == names
        assert world.why(task)


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


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (start_worker, "no_worker"),
        (keep_busy, "busy"),
        (lose_the_database, "database"),
        (lose_the_broker, "broker"),
    ],
)
def test_a_late_start_names_what_kept_its_worker_from_it(
    world: World, happens: Callable[[MainProcess], None], reason: str
) -> None:
    for ago_s, expected in ((20, "unnoticed"), (0, reason)):
        main, task = MainProcess(world), late(world)
        now_us = to_us(world.now()) - ago_s * 1_000_000
        with mock.patch.object(main.clock, "now_us", lambda now_us=now_us: now_us):
            happens(main)
        main.close()
        world.worker(f"{ago_s}", memory=main.processes.memory).run(task)
        assert late_start(world, task) == ("entry", expected)


def test_late_starts_are_counted_for_the_verdict_and_the_metrics(world: World) -> None:
    main = MainProcess(world)
    tasks = [world.put(), late(world), late(world)]
    main.write_counts(world.run(*tasks, world.schedule()))
    main.close()
    [problem] = verdict_of(read_deployment(world.delays)).problems
    assert problem.level == "note"
    assert problem.text == (
        "3 runs of the last 15 minutes began late: 2 because no message reached a worker in time; "
        "1 because the call came after the due time."
    )
    assert main.runtime.statistics is not None
    metrics = {metric.name: metric for metric in run_metrics(main.runtime.statistics.totals())}
    samples = metrics["delaytasks_late_starts"].samples
    assert [(tuple(each.labels.values()), each.value) for each in samples] == [
        (("note", "entry", "unnoticed"), 2), (("note", "entry", "scheduled_late"), 1),
    ]  # fmt: skip
