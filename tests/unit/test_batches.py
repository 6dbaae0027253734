"""A batch processor receives several tasks together and returns an outcome for each of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import Cancel, DelayTask, Done, Fail, Retry, Snooze
from delaytasks.core.workers import ChunkSize
from delaytasks.processors.registry import Registry
from tests.recording import RunnerHarness

Work = Callable[[list[DelayTask]], Any]


def run(bench: RunnerHarness, work: Work, count: int = 4, **options: Any) -> list[DelayTask]:
    """Run `count` tasks whose bodies are 0, 1, 2, …, and return each task as stored afterwards."""
    bench.registry.processor("batch", **{"batch": 100, **options})(work)
    tasks = [bench.schedule("batch", body) for body in range(count)]
    bench.run(*tasks)
    return [bench.now(task) for task in tasks]


def statuses(tasks: list[DelayTask]) -> list[str]:
    return [task.status.name for task in tasks]


# -- the tasks that a batch processor receives ----------------------------------------------------


def test_a_batch_is_called_once_for_as_many_tasks_as_it_takes(bench: RunnerHarness) -> None:
    got: list[list[int]] = []
    settled: list[int] = []
    bench.claims.before_settle = lambda settlements: settled.append(len(settlements))
    tasks = run(bench, lambda tasks: got.append([task.body for task in tasks]), 25, batch=10)
    assert got == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert statuses(tasks) == ["DONE"] * 25
    assert settled == [25]
    assert {(task.attempts, task.version) for task in tasks} == {(1, 2)}


def test_only_tasks_of_its_tag_are_in_a_batch_and_the_others_keep_their_order(
    bench: RunnerHarness,
) -> None:
    bench.registry.processor("batch", batch=10)(
        lambda tasks: bench.ran.append([task.body for task in tasks])
    )
    tasks = [
        bench.schedule(tag, body, priority=priority)
        for tag, body, priority in [
            ("note", "a", 9),
            ("batch", 1, 8),
            ("note", "b", 7),
            ("batch", 2, 6),
        ]
    ]
    bench.run(*tasks)
    assert bench.ran == ["a", [1, 2], "b"]


def test_with_two_arguments_the_first_one_has_the_bodies_converted_by_the_schema(
    bench: RunnerHarness,
) -> None:
    @dataclass
    class Order:
        order: int

    got: list[Any] = []

    def work(orders: list[Order], tasks: list[DelayTask]) -> None:
        got.append(
            [(type(order), order.order, task.id) for order, task in zip(orders, tasks, strict=True)]
        )

    bench.registry.processor("orders", batch=10, schema=Order)(work)
    tasks = [bench.schedule("orders", {"order": 7}), bench.schedule("orders", {"order": 8})]
    bench.run(*tasks)
    assert got == [[(Order, 7, tasks[0].id), (Order, 8, tasks[1].id)]]


def test_a_refused_body_and_a_body_that_is_not_json_affect_no_other_task(
    bench: RunnerHarness,
) -> None:
    def even(body: Any) -> Any:
        if body % 2:
            raise ValueError("odd")
        return body

    got: list[int] = []
    bench.registry.processor("batch", batch=10, schema=even, retries="10s")(
        lambda b, t: got.extend(b)
    )
    tasks = [bench.schedule("batch", body) for body in (0, 2, 4, 6)]
    bench.change(tasks[1], message_body="3")
    bench.change(tasks[2], message_body="{nope")
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "FAILED", "NOT_COMPLETE", "DONE"]
    assert "odd" in (bench.now(tasks[1]).error or "")
    assert "JSONDecodeError" in (bench.now(tasks[2]).error or "")
    assert got == [0, 6]


def test_an_expired_task_is_not_in_the_batch(bench: RunnerHarness) -> None:
    got: list[int] = []
    bench.registry.processor("batch", batch=10, expires=10)(
        lambda tasks: got.extend(task.body for task in tasks)
    )
    late, fine = bench.schedule("batch", 1), bench.schedule("batch", 2)
    bench.change(late, expected_time=bench.clock.now() - timedelta(seconds=60))
    bench.run(bench.now(late), fine)
    assert bench.statuses([late, fine]) == ["CANCELLED", "DONE"]
    assert got == [2]
    bench.change(
        only := bench.schedule("batch", 3), expected_time=bench.clock.now() - timedelta(seconds=60)
    )
    bench.run(bench.now(only))
    assert got == [2], "nor is it called for none"


def test_a_function_with_other_arguments_is_refused() -> None:
    for function in (lambda: None, lambda a, b, c: None):
        with pytest.raises(TypeError, match=r"\(tasks\) or \(bodies, tasks\)"):
            Registry().processor("batch", batch=10)(function)


# -- the outcomes that a batch processor returns --------------------------------------------------

OUTCOMES = [None, Done(), Retry(after="5m"), Snooze("30m"), Cancel("closed"), Fail("no")]
ENDS = ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED", "FAILED"]


@pytest.mark.parametrize(
    "said",
    [list, tuple, dict],
)
def test_each_task_has_the_outcome_that_the_processor_returned_for_it(
    bench: RunnerHarness, said: Any
) -> None:
    def work(tasks: list[DelayTask]) -> Any:
        if said is dict:
            return {
                task.id: outcome
                for task, outcome in zip(tasks, OUTCOMES, strict=True)
                if outcome is not None
            }
        return said(OUTCOMES)

    tasks = run(bench, work, len(OUTCOMES))
    assert statuses(tasks) == ENDS
    assert [task.attempts for task in tasks] == [1, 1, 1, 0, 1, 1]


def test_one_outcome_is_for_all(bench: RunnerHarness) -> None:
    tasks = run(bench, lambda tasks: Snooze("30m"))
    assert statuses(tasks) == ["NOT_COMPLETE"] * 4
    assert {task.attempts for task in tasks} == {0}


WRONG = {
    "too few": (lambda tasks: [None], "returned 1 outcome for 4 tasks"),
    "too many": (lambda tasks: [None] * 5, "returned 5 outcomes for 4 tasks"),
    "a stranger": (lambda tasks: {7: Done()}, "for 1 unknown id, such as 7"),
    "ids as text": (lambda tasks: {str(tasks[0].id): Done()}, "the keys are task.id"),
    "a number": (lambda tasks: 4, "returned a int"),
    "a generator": (lambda tasks: (None for _ in tasks), "returned a generator"),
    "text": (lambda tasks: "done", "returned a str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_return_value_without_an_outcome_for_each_task_retries_all(
    bench: RunnerHarness, name: str
) -> None:
    work, says = WRONG[name]
    tasks = run(bench, work, retries="10s")
    assert statuses(tasks) == ["NOT_COMPLETE"] * 4
    for task in tasks:
        assert "InvalidOutcomesError: the batch's processor returned" in (task.error or "")
        assert says in (task.error or "")


def test_an_error_of_the_processor_fails_all_tasks_by_the_usual_rules(bench: RunnerHarness) -> None:
    def fail(tasks: list[DelayTask]) -> None:
        raise ConnectionError("busy")

    tasks = run(bench, fail, retries={ConnectionError: "10s"})
    assert statuses(tasks) == ["NOT_COMPLETE"] * 4
    assert {task.attempts for task in tasks} == {1}
    for task in tasks:
        bench.change(task, expected_time=bench.clock.now() - timedelta(milliseconds=10))
    bench.run(*map(bench.now, tasks))
    assert bench.statuses(tasks) == ["FAILED"] * 4
    error = bench.now(tasks[3]).error or ""
    assert "ConnectionError: busy" in error
    assert "in fail" in error


def test_an_invalid_outcome_fails_only_its_own_task(bench: RunnerHarness) -> None:
    tasks = run(bench, lambda tasks: [None, Retry(), Snooze(-1), None])
    assert statuses(tasks) == ["DONE", "FAILED", "FAILED", "DONE"]
    assert "needs a retry schedule" in (tasks[1].error or "")


def test_each_result_is_stored_with_its_task(bench: RunnerHarness) -> None:
    tasks = run(
        bench,
        lambda tasks: [Done(7) if task.body else "first" for task in tasks],
        2,
        keep_result=True,
    )
    assert [task.result for task in tasks] == ["first", 7]


# -- other properties of a run --------------------------------------------------------------------


def test_a_batch_that_stops_the_worker_does_not_affect_other_rows(
    bench: RunnerHarness,
) -> None:
    def stop(tasks: list[DelayTask]) -> None:
        raise WorkerShutdown(0)

    bench.registry.processor("batch", batch=10)(stop)
    tasks = [
        bench.schedule(priority=9),
        bench.schedule("batch"),
        bench.schedule("batch"),
        bench.schedule(),
    ]
    with pytest.raises(WorkerShutdown):
        bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "RUNNING", "RUNNING", "NOT_COMPLETE"]


def test_batches_run_concurrently_and_as_coroutines(bench: RunnerHarness) -> None:
    both = threading.Barrier(2, timeout=10)

    def wait(tasks: list[DelayTask]) -> None:
        both.wait()

    bench.registry.processor("concurrent", batch=5, in_flight=2)(wait)

    async def work(tasks: list[DelayTask]) -> list[Any]:
        await asyncio.sleep(0.01)
        return [Fail("odd") if task.body % 2 else None for task in tasks]

    bench.registry.processor("async", batch=5)(work)
    tasks = [bench.schedule("concurrent") for _ in range(10)]
    assert bench.run(*tasks).wanted == 10
    assert bench.statuses(tasks) == ["DONE"] * 10
    tasks = [bench.schedule("async", body) for body in range(10)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "FAILED"] * 5


def test_chunks_have_the_size_of_a_batch_even_beyond_the_time_budget(
    bench: RunnerHarness,
) -> None:
    size = ChunkSize(0.05, 200)
    bench.registry.processor("batch", batch=100)(lambda tasks: time.sleep(0.2))
    report = bench.run(*[bench.schedule("batch") for _ in range(10)])
    assert report.wanted == 100
    for _ in range(20):
        size.learn(report.ran, report.seconds, report.wanted)
    assert (size.rows, size.least) == (100, 100)
    size.learn(10, 0.2, 0)
    assert size.rows < 5, "others came, who want none of that"
    size.learn(0, 0.0, 0)
    assert size.least == 1
