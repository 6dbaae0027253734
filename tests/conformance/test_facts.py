"""The facts that explain why a task has not run, as each database reports them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaytasks import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.why import why
from delaytasks.storage.state_queries import FactReader
from delaytasks.storage.store import Store
from delaytasks.storage.worker_table import MAX_TAG_BYTES, WorkerTable
from tests.conformance.store_rows import RUNNING
from tests.recording import RunnerHarness


@pytest.fixture
def bench(store: Store) -> RunnerHarness:
    bench = RunnerHarness(store)
    bench.store.workers.report("w1", ["default"], "prefork", 2, 0, ["note", "limited"])
    bench.store.sweeps.begin_sweep(0, 1, 4.0)
    return bench


def codes(bench: RunnerHarness, task: DelayTask) -> list[str]:
    return [
        reason.code for reason in why(FactReader(bench.store, bench.settings).of(bench.now(task)))
    ]


def test_a_task_with_a_worker_has_no_reason_to_wait(bench: RunnerHarness) -> None:
    assert codes(bench, bench.schedule()) == ["due"]
    assert codes(bench, bench.schedule(delay=60)) == ["future"]


def test_a_deferred_task_names_its_tag(bench: RunnerHarness) -> None:
    task = bench.schedule("unknown")
    assert codes(bench, task) == ["no_processor"], (
        "the registry knows it before any worker has tried"
    )
    bench.run(task)
    assert bench.now(task).expected_time > bench.clock.now()
    assert codes(bench, task) == ["no_processor"]


def test_a_worker_that_was_not_seen_for_long_serves_nothing(bench: RunnerHarness) -> None:
    task, w = bench.schedule(), bench.store.schema.workers
    with bench.store.database.begin() as connection:
        connection.execute(w.update().values(seen_at=bench.clock.now() - timedelta(minutes=1)))
    assert codes(bench, task) == ["no_worker"]


def test_a_paused_tag_and_a_paused_queue_are_named(bench: RunnerHarness) -> None:
    task = bench.schedule()
    for kind, name in (("tag", "note"), ("queue", "default")):
        bench.store.policies.set(kind, name, {"is_paused": True}, "ann")
        assert codes(bench, task) == ["paused"]
        bench.store.policies.set(kind, name, {"is_paused": False}, "ann")
    assert codes(bench, task) == ["due"]


def test_a_task_in_a_waitlist_is_distinguished_from_a_paused_task(
    bench: RunnerHarness,
) -> None:
    bench.registry.processor("limited")(bench.ran.append)
    bench.store.policies.set("tag", "limited", {"concurrency": 1}, "ann")
    first, second = bench.schedule("limited"), bench.schedule("limited")
    [running] = bench.claims.claim([bench.entry(first), bench.entry(second)])
    waits = second if running.id == first.id else first
    assert bench.now(waits).status is Status.HELD
    assert codes(bench, waits) == ["limit"]


def test_a_retry_is_distinguished_from_a_task_of_the_future(bench: RunnerHarness) -> None:
    def fail(body: object) -> None:
        raise ValueError("no")

    bench.registry.processor("limited", retries="60s")(fail)
    task = bench.schedule("limited")
    bench.run(task)
    assert codes(bench, task) == ["retry"]


def test_rows_with_invalid_values_have_reasons_too(bench: RunnerHarness) -> None:
    task = bench.schedule()
    for values in (
        RUNNING | {"worker": ""},
        {"status": 5, "concurrency_key": "x" * 255},
    ):
        bench.change(task, **values)
        assert codes(bench, task)


def test_a_worker_publishes_its_current_tags_and_removes_old_ones(
    bench: RunnerHarness,
) -> None:
    assert bench.store.workers.all()[0]["tags"] == {"note", "limited"}
    bench.store.workers.report("w1", ["default"], "prefork", 2, 0, ["other"])
    assert bench.store.workers.all()[0]["tags"] == {"other"}


def test_a_worker_that_was_removed_publishes_its_tags_again(bench: RunnerHarness) -> None:
    bench.store.workers.remove("w1")
    bench.store.workers.report("w1", ["default"], "prefork", 2, 0, ["note", "limited"])
    assert bench.store.workers.all()[0]["tags"] == {"note", "limited"}


def test_more_tags_than_the_registry_takes_are_not_published(bench: RunnerHarness) -> None:
    many = [f"tag.{number}" for number in range(MAX_TAG_BYTES)]
    bench.store.workers.report("w1", ["default"], "prefork", 2, 0, many)
    assert bench.store.workers.all()[0]["tags"] is None
    assert codes(bench, bench.schedule()) == ["due"], "what is not known is no reason"


def test_a_worker_that_starts_again_replaces_the_tags_of_the_one_before(
    bench: RunnerHarness,
) -> None:
    restarted = WorkerTable(bench.store.database, bench.store.schema)
    restarted.report(
        "w1", ["default"], "prefork", 2, 0, [f"tag.{number}" for number in range(MAX_TAG_BYTES)]
    )
    assert restarted.all()[0]["tags"] is None


def test_a_worker_that_publishes_no_tags_is_no_reason(bench: RunnerHarness) -> None:
    w = bench.store.schema.workers
    with bench.store.database.begin() as connection:
        connection.execute(w.update().values(tags=None))
    assert codes(bench, bench.schedule()) == ["due"]
