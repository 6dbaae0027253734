"""Why a task has not run, on every database."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial

import pytest
from celery import Celery
from sqlalchemy import select

from delaytasks import DelayedTask, DelayTasks, Status
from tests.services import free_port
from tests.world import RUNNING, MakeWorld, World
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


def test_a_task_with_a_worker_has_no_reason_to_wait(world: World) -> None:
    assert fact_codes(world, world.schedule()) == ["due"]
    assert fact_codes(world, world.schedule(delay=60)) == ["future"]


def test_a_deferred_task_names_its_tag(world: World) -> None:
    task = world.schedule("unknown")
    assert fact_codes(world, task) == ["no_processor"], (
        "the registry knows it before any worker has tried"
    )
    world.run(task)
    assert world.read(task).expected_time > world.now()
    assert fact_codes(world, task) == ["no_processor"]


def test_a_worker_that_was_not_seen_for_long_serves_nothing(world: World) -> None:
    task = world.schedule()
    world.silence()
    assert fact_codes(world, task) == ["no_worker"]


def test_a_paused_tag_and_a_paused_queue_are_named(world: World) -> None:
    task = world.schedule()
    for named in ({"tag": "note"}, {"queue": "default"}):
        world.delays.policies.pause(**named)
        assert fact_codes(world, task) == ["paused"]
        world.delays.policies.resume(**named)
    assert fact_codes(world, task) == ["due"]


def test_a_task_in_a_waitlist_is_distinguished_from_a_paused_task(world: World) -> None:
    world.delays.processor("limited")(world.notes.append)
    world.limit("limited", concurrency=1)
    first, second = world.schedule("limited"), world.schedule("limited")
    [running] = world.claim(first, second)
    waits = second if running.id == first.id else first
    assert world.read(waits).status is Status.HELD
    assert fact_codes(world, waits) == ["limit"]


def test_a_retry_is_distinguished_from_a_task_of_the_future(world: World) -> None:
    def fail(body: object) -> None:
        raise ValueError("no")

    world.delays.processor("limited", retries="60s")(fail)
    world.run(task := world.schedule("limited"))
    assert fact_codes(world, task) == ["retry"]


def test_rows_with_invalid_values_have_reasons_too(world: World) -> None:
    task = world.schedule()
    for values in (RUNNING | {"worker": ""}, {"status": 5, "limit_key": "x" * 255}):
        world.change(task, **values)
        assert fact_codes(world, task)


def test_a_worker_publishes_its_current_tags_and_removes_old_ones(world: World) -> None:
    assert tags_of_worker(world) == {"note", "limited"}
    world.serve("w1", "default", tags=["other"])
    assert tags_of_worker(world) == {"other"}


def test_a_worker_that_was_removed_publishes_its_tags_again(world: World) -> None:
    world.store.workers.remove("w1")
    world.serve("w1", "default", tags=["note", "limited"])
    assert tags_of_worker(world) == {"note", "limited"}


def test_more_tags_than_the_registry_takes_are_not_published(world: World) -> None:
    world.serve("w1", "default", tags=TOO_MANY)
    assert tags_of_worker(world) is None
    assert fact_codes(world, world.schedule()) == ["due"], "what is not known is no reason"


def test_a_worker_that_starts_again_replaces_its_tags(world: World, make_world: MakeWorld) -> None:
    make_world().serve("w1", "default", tags=TOO_MANY)
    assert tags_of_worker(world) is None


def test_a_worker_that_publishes_no_tags_is_no_reason(world: World) -> None:
    w = world.table("workers")
    with world.begin() as connection:
        connection.execute(w.update().values(tags=None))
    assert fact_codes(world, world.schedule()) == ["due"]


# The explanation of a task names what the database, the broker and the timer report


def codes(delays: DelayTasks, task: DelayedTask) -> list[str]:
    reasons = explain(delays, task).reasons
    assert json.dumps([each.as_json() for each in reasons]), "the result is JSON"
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
    [reason] = explain(delays, by_ann).reasons
    assert f"by ann (entry {run} of the log)" in reason.sentence
    assert reason.facts["actor"] == "ann"
    assert explain(delays, by_bob).reasons[0].facts["actor"] == "bob"


def test_a_task_that_a_person_cancelled_alone_names_the_actor(delays: DelayTasks) -> None:
    mine, other = delays.schedule_delay("a", {}, 60), delays.schedule_delay("a", {}, 60)
    record = partial(record_action, delays)
    for task in (mine, other):
        delays.cancel(task)
    record("cancel_task", {"id": str(mine.id)}, "ann", task=mine.id)
    record("cancel_task", {"id": str(mine.id)}, "bob", task=mine.id, is_refused=True)
    record("cancel_task", {"id": f"{mine.id}0"}, "bob")
    record("rerun_task", {"id": str(mine.id)}, "bob", task=mine.id)
    [entry] = [entry for entry in delays.bulk.log() if entry.actor == "ann"]
    [reason] = explain(delays, mine).reasons
    assert f"by ann (entry {entry.id} of the log)" in reason.sentence
    assert reason.facts["actor"] == "ann"
    assert explain(delays, other).reasons[0].facts["actor"] is None


@pytest.mark.usefixtures("served")
def test_the_task_of_a_recurring_schedule_names_the_schedule(delays: DelayTasks) -> None:
    delays.recurring.set("nightly", "report.send", cron="0 2 * * *")
    task = delays.recurring.schedule_now("nightly")
    assert codes(delays, task) == ["due", "recurring"]
    reason = explain(delays, task).reasons[-1]
    assert reason.sentence.startswith("It is a task of the recurring schedule nightly (0 2 * * *)")
    delays.recurring.pause("nightly")
    assert explain(delays, task).reasons[-1].sentence.endswith("it is paused.")
    delays.recurring.set("often", "report.send", every="5m")
    of_interval = explain(delays, delays.recurring.schedule_now("often")).reasons[-1]
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
    [reason] = explain(delays, held[0]).reasons
    assert (reason.facts["running"], reason.facts["waitlist_tasks"]) == (1, 3)
    assert "1 may run at the same time, and 1 do. Its waitlist has 3 tasks." in reason.sentence


def test_an_expired_task_says_that_it_will_be_cancelled(delays: DelayTasks, served: World) -> None:
    task = delays.schedule_delay("a", {}, 0, max_late=0.001)
    served.change(task, expected_time=task.expected_time - timedelta(minutes=1))
    assert codes(delays, task) == ["due", "expired"]
