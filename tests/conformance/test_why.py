"""Why a task has not run, on every database."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial

import pytest
from celery import Celery

from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.core.why import Explanation, why
from delaytasks.operations.bulk_calls import record_action
from delaytasks.runtime import runtime_of
from delaytasks.storage.state_queries import FactReader
from delaytasks.storage.store import Store
from delaytasks.storage.worker_table import MAX_TAG_BYTES, WorkerTable
from tests.recording import delays_on
from tests.services import free_port
from tests.world import RUNNING, MakeWorld, World

# The facts that explain why a task has not run, as each database reports them


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    world = make_world()
    world.store.workers.report("w1", ["default"], "prefork", 2, 0, ["note", "limited"])
    world.store.sweeps.begin_sweep(0, 1, 4.0)
    return world


def fact_codes(world: World, task: DelayedTask) -> list[str]:
    return [
        reason.code
        for reason in why(FactReader(world.store, world.delays.settings).of(world.read(task)))
    ]


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
    for kind, name in (("tag", "note"), ("queue", "default")):
        world.store.policies.set(kind, name, {"is_paused": True}, "ann")
        assert fact_codes(world, task) == ["paused"]
        world.store.policies.set(kind, name, {"is_paused": False}, "ann")
    assert fact_codes(world, task) == ["due"]


def test_a_task_in_a_waitlist_is_distinguished_from_a_paused_task(world: World) -> None:
    world.delays.processor("limited")(world.notes.append)
    world.store.policies.set("tag", "limited", {"concurrency": 1}, "ann")
    first, second = world.schedule("limited"), world.schedule("limited")
    [running] = world.claim(first, second)
    waits = second if running.id == first.id else first
    assert world.read(waits).status is Status.HELD
    assert fact_codes(world, waits) == ["limit"]


def test_a_retry_is_distinguished_from_a_task_of_the_future(world: World) -> None:
    def fail(body: object) -> None:
        raise ValueError("no")

    world.delays.processor("limited", retries="60s")(fail)
    task = world.schedule("limited")
    world.run(task)
    assert fact_codes(world, task) == ["retry"]


def test_rows_with_invalid_values_have_reasons_too(world: World) -> None:
    task = world.schedule()
    for values in (RUNNING | {"worker": ""}, {"status": 5, "limit_key": "x" * 255}):
        world.change(task, **values)
        assert fact_codes(world, task)


def test_a_worker_publishes_its_current_tags_and_removes_old_ones(world: World) -> None:
    assert world.store.workers.all()[0]["tags"] == {"note", "limited"}
    world.store.workers.report("w1", ["default"], "prefork", 2, 0, ["other"])
    assert world.store.workers.all()[0]["tags"] == {"other"}


def test_a_worker_that_was_removed_publishes_its_tags_again(world: World) -> None:
    world.store.workers.remove("w1")
    world.store.workers.report("w1", ["default"], "prefork", 2, 0, ["note", "limited"])
    assert world.store.workers.all()[0]["tags"] == {"note", "limited"}


def test_more_tags_than_the_registry_takes_are_not_published(world: World) -> None:
    many = [f"tag.{number}" for number in range(MAX_TAG_BYTES)]
    world.store.workers.report("w1", ["default"], "prefork", 2, 0, many)
    assert world.store.workers.all()[0]["tags"] is None
    assert fact_codes(world, world.schedule()) == ["due"], "what is not known is no reason"


def test_a_worker_that_starts_again_replaces_the_tags_of_the_one_before(world: World) -> None:
    restarted = WorkerTable(world.store.database, world.store.schema)
    restarted.report(
        "w1", ["default"], "prefork", 2, 0, [f"tag.{number}" for number in range(MAX_TAG_BYTES)]
    )
    assert restarted.all()[0]["tags"] is None


def test_a_worker_that_publishes_no_tags_is_no_reason(world: World) -> None:
    w = world.table("workers")
    with world.begin() as connection:
        connection.execute(w.update().values(tags=None))
    assert fact_codes(world, world.schedule()) == ["due"]


# The explanation of a task names what the database, the broker and the timer report


def explain(delays: DelayTasks, task: DelayedTask | int) -> Explanation:
    explanation = runtime_of(delays).explanations.of(task)
    assert json.dumps([each.as_json() for each in explanation.reasons]), "the result is JSON"
    return explanation


def codes(delays: DelayTasks, task: DelayedTask) -> list[str]:
    return [reason.code for reason in explain(delays, task).reasons]


def serve(store: Store) -> None:
    store.workers.report("w1", ["*"], "prefork", 2, 0)
    store.sweeps.begin_sweep(0, 1, 4.0)


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
    record = partial(record_action, runtime_of(delays))
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


def test_the_task_of_a_recurring_schedule_names_the_schedule(
    delays: DelayTasks, store: Store
) -> None:
    serve(store)
    delays.recurring.set("nightly", "report.send", cron="0 2 * * *")
    task = delays.recurring.schedule_now("nightly")
    assert codes(delays, task) == ["due", "recurring"]
    reason = explain(delays, task).reasons[-1]
    assert reason.sentence.startswith("It is a task of the recurring schedule nightly (0 2 * * *)")
    delays.recurring.pause("nightly")
    assert explain(delays, task).reasons[-1].sentence.endswith("it is paused.")
    other = delays.schedule_delay("report.send", {}, 60, key="weekly@2030-01-01T00:00:00Z")
    assert codes(delays, other) == ["future"], "the key looks like that of an unknown schedule"


def test_a_broker_that_is_down_is_named_for_a_task_that_is_due_soon(
    store: Store, database_url: str
) -> None:
    serve(store)
    broker = f"redis://127.0.0.1:{free_port()}/0"
    app = Celery("test", broker=broker, set_as_current=False)
    delays = DelayTasks(app, database_url, table_prefix="s_", arm="inline")
    assert codes(delays, delays.schedule_delay("a", {}, 5)) == ["future", "broker_down"]
    assert codes(delays, delays.schedule_delay("a", {}, 3600)) == ["future"], "it is not needed yet"
    delays.close()


def test_a_redis_timer_that_is_down_is_named(store: Store, database_url: str) -> None:
    serve(store)
    redis = f"redis://127.0.0.1:{free_port()}/0"
    options = {"timer": redis, "arm": "inline"}
    delays = delays_on(database_url, table_prefix="s_", **options)
    assert codes(delays, delays.schedule_delay("a", {}, 5)) == ["future", "timer_down"]
    delays.close()


def test_a_waitlist_names_the_limit_and_its_length(
    delays: DelayTasks, store: Store, make_world: MakeWorld
) -> None:
    serve(store)
    delays.policies.set(tag="mail", concurrency=1)
    delays.processor("mail")(lambda body: None)
    tasks = [delays.schedule_delay("mail", {}, 0) for _ in range(4)]
    make_world().claim(*tasks)
    held = [task for task in tasks if delays.get(task).status.name == "HELD"]
    [reason] = explain(delays, held[0]).reasons
    assert (reason.facts["running"], reason.facts["waitlist_tasks"]) == (1, 3)
    assert "1 may run at the same time, and 1 do. Its waitlist has 3 tasks." in reason.sentence


def test_an_expired_task_says_that_it_will_be_cancelled(delays: DelayTasks, store: Store) -> None:
    serve(store)
    task = delays.schedule_delay("a", {}, 0, max_late=0.001)
    with store.database.begin() as connection:
        t = store.schema.tasks
        due = task.expected_time - timedelta(minutes=1)
        connection.execute(t.update().where(t.c.id == task.id).values(expected_time=due))
    assert codes(delays, task) == ["due", "expired"]
