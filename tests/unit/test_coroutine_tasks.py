"""`celery.current_task` is correct in `async def` processors, whose rows share one thread."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task, current_task
from celery._state import get_current_task, get_current_worker_task

from delaytasks.processors.registry import EventLoop, result_of
from delaytasks.worker.celery_context import CeleryTaskContext
from tests.recording import RunnerHarness
from tests.unit.conftest import Make

SECOND = timedelta(seconds=2)


@pytest.fixture
def app() -> Celery:
    return Celery(broker="memory://nowhere", set_as_current=False)


@pytest.fixture
def bench(make: Make, app: Celery) -> RunnerHarness:
    made = make()
    made.execute = CeleryTaskContext(app, "w@host", made.clock)  # type: ignore[method-assign]
    made.runner = made.make_runner()
    return made


def test_a_retry_in_a_coroutine_follows_the_retry_schedule_and_its_limits(
    bench: RunnerHarness,
) -> None:
    async def ask(given: Any) -> None:
        raise current_task.retry()

    bench.registry.processor("scheduled", retries="1m 1h")(ask)
    bench.registry.processor("limited")(ask)
    second, limited = bench.schedule("scheduled"), bench.schedule("limited")
    for task, attempts in ((second, 1), (limited, 3)):
        bench.change(task, attempts=attempts)
        bench.run(task)
    wait = bench.now(second).expected_time - bench.clock.now()
    assert abs(wait - timedelta(hours=1)) < SECOND
    assert bench.now(limited).status.name == "FAILED"
    assert "MaxRetriesExceededError" in (bench.now(limited).error or "")


def test_rows_that_interleave_have_requests_of_their_own(bench: RunnerHarness) -> None:
    seen: list[tuple[Any, ...]] = []
    all_there = asyncio.Barrier(6) if hasattr(asyncio, "Barrier") else None

    async def look(given: Any, task: Any) -> None:
        for _ in range(3):
            await (all_there.wait() if all_there else asyncio.sleep(0.05))
            request = current_task.request
            seen.append(
                (task.tag, task.id, current_task.name, int(request.id), request.delay_task.id)
            )
            child = await asyncio.create_task(child_id())
            seen.append((task.tag, task.id, current_task.name, child, task.id))

    async def child_id() -> int:
        await asyncio.sleep(0)
        return int(current_task.request.id)

    bench.registry.processor("a")(look)
    bench.registry.processor("b")(look)
    tasks = [bench.schedule(tag) for tag in "aaabbb"]
    bench.run(*tasks)
    assert set(bench.statuses(tasks)) == {"DONE"}
    assert len(seen) == 36
    for tag, id, name, shown, other in seen:
        assert (name, shown, other) == (tag, id, id)


def test_messages_sent_by_a_coroutine_name_the_row_as_their_parent(
    bench: RunnerHarness, app: Celery
) -> None:
    found: list[Any] = []

    @bench.registry.processor("a")
    async def ask(given: Any) -> None:
        found.append(get_current_worker_task().request.id)
        with pytest.raises(Exception, match="use schedule_delay"):
            current_task.delay()

    task = bench.schedule("a")
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]
    assert found == [str(task.id)]


def test_a_celery_task_that_a_coroutine_calls_is_current_meanwhile(
    bench: RunnerHarness, app: Celery
) -> None:
    names: list[str] = []

    @app.task(bind=True, name="charge")
    def charge(self: Task) -> None:
        names.append(current_task.name)

    @bench.registry.processor("a")
    async def ask(given: Any) -> None:
        charge()
        names.append(current_task.name)

    bench.run(bench.schedule("a"))
    assert names == ["charge", "a"]


def test_outside_of_rows_the_event_loop_has_no_worker_task(bench: RunnerHarness) -> None:
    async def find() -> tuple[Any, Any]:
        task = get_current_task()
        return get_current_worker_task(), task and task.request.id

    assert result_of(find()) == (None, None)


def test_a_start_function_of_the_event_loop_is_called_in_each_new_loop() -> None:
    loop, calls = EventLoop(), list[int]()

    def call() -> None:
        calls.append(1)

    async def nothing() -> None: ...

    loop.at_start(call)
    loop.at_start(call)
    loop.result_of(nothing())
    assert len(calls) == 1
    loop.after_fork()
    loop.result_of(nothing())
    assert len(calls) == 2

    late: list[int] = []
    loop.at_start(lambda: late.append(1))
    loop.result_of(nothing())
    assert late == [1], "the loop ran already"
