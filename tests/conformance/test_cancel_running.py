"""A running task is asked to stop, and is CANCELLED unless it succeeds, on each database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks import (
    CancelTooLateError,
    DelayTask,
    DelayTasks,
    Fail,
    Retry,
    Snooze,
    StaleVersionError,
    Status,
    TaskCancelledError,
)
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from delaytasks.worker.shared_memory import RequestedRuns
from tests.recording import RunnerHarness


class CancellingHarness(RunnerHarness):
    """A runner whose processors can cancel their own tasks, as another process would."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.requested = RequestedRuns()
        self.runner = self.make_runner(is_asked_to_stop=self.requested.has)

    def cancel(self, task: DelayTask) -> DelayTask | None:
        found = self.store.tasks.cancel(task.id, running=True)
        self.read_requests()
        return found

    def read_requests(self) -> None:
        """Do what the main process of a worker does after a request."""
        self.requested.record(self.store.tasks.cancel_requests.of(["worker-1"]))


@pytest.fixture
def bench(store: Store) -> CancellingHarness:
    return CancellingHarness(store)


def run(bench: CancellingHarness, end: Callable[[DelayTask], Any], **options: Any) -> DelayTask:
    """Run a task that is cancelled while it runs, and ends as `end` says."""

    def work(body: object, task: DelayTask) -> Any:
        assert not task.is_cancelled
        task.check_lease()
        left = bench.cancel(task)
        assert left is not None
        assert (left.status, left.version) == (Status.RUNNING, task.version)
        assert task.is_cancelled
        return end(task)

    bench.registry.processor("long", **options)(work)
    task = bench.schedule("long", key="k")
    bench.run(task)
    return bench.now(task)


def fail(_: DelayTask) -> None:
    raise ValueError("broken off")


@pytest.mark.parametrize(
    "end",
    [DelayTask.check_lease, fail, lambda _: Retry(1), lambda _: Snooze(1), lambda _: Fail("no")],
    ids=["check_lease", "raises", "Retry", "Snooze", "Fail"],
)
def test_a_run_that_stops_is_cancelled_and_not_retried(
    bench: CancellingHarness, end: Callable[[DelayTask], Any]
) -> None:
    task = run(bench, end, retries="10s 10s")
    assert task.status is Status.CANCELLED
    assert str(task.error).startswith("cancelled by a caller while it ran")
    assert ("broken off" in str(task.error)) is (end is fail)
    assert len(bench.named("task.withdrawn")) == 1
    assert not bench.named("task.failed") + bench.named("task.retry_scheduled")
    assert bench.store.tasks.id_of_key("long", "k") is None, "the key is free"


def test_a_run_that_succeeds_nevertheless_is_done(bench: CancellingHarness) -> None:
    assert run(bench, lambda _: 5, keep_result=True).result == 5


def test_check_lease_says_that_the_task_was_cancelled(bench: CancellingHarness) -> None:
    told: list[TaskCancelledError] = []

    def end(task: DelayTask) -> None:
        with pytest.raises(TaskCancelledError, match="was cancelled: stop") as caught:
            task.check_lease()
        told.append(caught.value)

    assert run(bench, end).status is Status.DONE
    assert told


def test_a_request_that_comes_too_late_for_its_run_prevents_the_next_one(
    bench: CancellingHarness,
) -> None:
    ran: list[int] = []

    @bench.registry.processor("again")
    def work(body: object, task: DelayTask) -> Any:
        ran.append(task.attempts)
        bench.store.tasks.cancel(task.id, running=True)  # the process hears nothing of it
        return Snooze(0)

    task = bench.schedule("again")
    bench.run(task)
    waits = bench.now(task)
    assert (waits.status, waits.cancel_request) == (Status.NOT_COMPLETE, 1)
    bench.change(task, expected_time=task.expected_time)
    bench.run(bench.now(task))
    ended = bench.now(task)
    assert (ended.status, ran) == (Status.CANCELLED, [1])


def test_a_row_of_the_same_chunk_that_has_not_begun_is_cancelled_too(
    bench: CancellingHarness,
) -> None:
    tasks: list[DelayTask] = []

    @bench.registry.processor("first")
    def work(body: object) -> None:
        bench.cancel(bench.now(tasks[1]))

    tasks += [bench.schedule("first", priority=9), bench.schedule("note", 2)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "CANCELLED"]
    assert bench.ran == []


def test_a_rerun_forgets_the_request(bench: CancellingHarness) -> None:
    cancelled = run(bench, fail)
    bench.registry.processor("other")(lambda body: None)
    again = bench.store.tasks.rerun(cancelled.id, cancelled.expected_time)
    assert bench.now(again).cancel_request is None
    assert bench.store.tasks.cancel_requests.of(["worker-1"]) == []


def test_a_request_is_for_one_run_of_the_row(bench: CancellingHarness) -> None:
    task = run(bench, fail)
    assert bench.requested.has(task.id, task.version - 1)
    assert not bench.requested.has(task.id, task.version)
    bench.read_requests()
    assert not bench.requested.has(task.id, task.version - 1)


def test_the_answer_of_cancel_says_that_the_task_was_asked_to_stop(
    store: Store, delays: DelayTasks
) -> None:
    task = delays.schedule_delay("mail", {}, 0, key="k")
    [claimed] = runtime_of(delays).store.claims("w", None).claim_due("default", [0], 1)
    numbers = runtime_of(delays).store.policies
    before = numbers.changes(None, True).cancel_requests
    assert not delays.cancel(task).is_requested
    with pytest.raises(CancelTooLateError):
        delays.cancel(task, strict=True)
    assert numbers.changes(None, True).cancel_requests == before
    result = delays.cancel(tag="mail", key="k", running=True, strict=True)
    assert (bool(result), result.is_requested, result.status) == (False, True, Status.RUNNING)
    assert numbers.changes(None, False).cancel_requests == before + 1
    found = delays.get(task)
    assert (found.version, found.cancel_request) == (claimed.version, 1)
    with pytest.raises(StaleVersionError):
        delays.cancel(task, running=True, version=claimed.version - 1)
    with store.database.tx.connect() as connection:
        assert delays.cancel(task, running=True, session=connection).is_requested
        connection.rollback()
    assert delays.get(task).cancel_request == 1


def test_a_row_that_is_given_back_while_it_is_asked_to_stop_is_cancelled(
    store: Store, delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = delays.schedule_delay("mail", {}, 0)
    runtime_of(delays).store.claims("w", None).claim_due("default", [0], 1)
    requests, t = runtime_of(delays).store.tasks.cancel_requests, store.schema.tasks
    make = requests.make

    def make_too_late(on: Any, running: DelayTask) -> bool:
        given_back = {"status": int(Status.NOT_COMPLETE), "version": running.version + 1}
        on.execute(update(t).where(t.c.id == running.id).values(given_back))
        return make(on, running)

    monkeypatch.setattr(requests, "make", make_too_late)
    assert delays.cancel(task, running=True)
    assert delays.get(task).is_cancelled


def test_a_task_that_waits_is_cancelled_as_usual(delays: DelayTasks) -> None:
    task = delays.schedule_delay("mail", {}, 60)
    assert delays.cancel(task, running=True)
    assert not delays.cancel(task, running=True)
    assert delays.get(task).is_cancelled


def test_the_other_tasks_of_a_batch_run_again_without_losing_an_attempt(
    bench: CancellingHarness,
) -> None:
    def work(tasks: list[DelayTask]) -> None:
        if len(tasks) == 3:
            bench.cancel(tasks[1])
        for task in tasks:
            task.check_lease()

    bench.registry.processor("batch", batch=10)(work)
    tasks = [bench.schedule("batch") for _ in range(3)]
    bench.run(*tasks)
    first, cancelled, last = map(bench.now, tasks)
    assert cancelled.status is Status.CANCELLED
    for other in (first, last):
        assert (other.status, other.attempts) == (Status.NOT_COMPLETE, 0)
    bench.run(first, last)
    assert bench.statuses([first, last]) == ["DONE", "DONE"]
