"""A task is not DONE if the code of its processor did not run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import coroutine
from typing import Any

import pytest

from delaytasks import Done
from delaytasks.core.errors import InvalidOutcomesError
from delaytasks.processors.registry import Registry
from delaytasks.worker.celery_context import CeleryTaskContext
from tests.recording import RunnerHarness


def generator(body: Any) -> Any:
    yield body


async def async_generator(body: Any) -> Any:
    yield body


@coroutine
def old_coroutine(body: Any) -> Any:
    yield from ()


class GeneratorMethod:
    def __call__(self, body: Any) -> Any:
        yield body


class AsyncGeneratorMethod:
    async def __call__(self, body: Any) -> Any:
        yield body


REFUSED: dict[str, Callable[..., Any]] = {
    "coroutine of the old kind": old_coroutine,
    "generator": generator,
    "async generator": async_generator,
    "partial": functools.partial(generator),
    "partial of an async generator": functools.partial(async_generator),
    "bound method": GeneratorMethod().__call__,
    "callable object": GeneratorMethod(),
    "callable object, async": AsyncGeneratorMethod(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("options", [{}, {"batch": 5}, {"in_flight": 5}], ids=str)
def test_a_generator_function_is_no_processor(name: str, options: Any) -> None:
    registry = Registry()
    with pytest.raises(TypeError, match="contains `yield`") as raised:
        registry.processor("lazy", **options)(REFUSED[name])
    assert "return" in str(raised.value), "it states the remedy"
    assert registry.get("lazy") is None


def test_a_function_that_hides_a_generator_function_is_accepted() -> None:
    @functools.wraps(generator)
    def wrapped(body: Any) -> Any:
        return list(generator(body))

    registry = Registry()
    registry.processor("eager")(wrapped)
    assert next(iter(registry)).function(1) == [1]


class Awaitable:
    def __await__(self) -> Iterator[Any]:
        yield from ()


async def returns_a_generator(body: Any) -> Any:
    return generator(body)


async def returns_a_generator_as_outcome(body: Any) -> Any:
    return Done(generator(body))


UNRUN: dict[str, Callable[[Any], Any]] = {
    "generator": lambda body: generator(body),
    "generator expression": lambda body: (each for each in body),
    "async generator": lambda body: async_generator(body),
    "map": lambda body: map(print, body),
    "filter": lambda body: filter(print, body),
    "awaitable": lambda body: Awaitable(),
    "coroutine of the old kind": lambda body: old_coroutine(body),
    "a generator, from a coroutine": returns_a_generator,
    "a generator, from a coroutine, as an outcome": returns_a_generator_as_outcome,
    "an awaitable as a result": lambda body: Done(Awaitable()),
}
FORMS: list[dict[str, Any]] = [{}, {"in_flight": 5}, {"keep_result": True}, {"retries": "1m"}]


@pytest.mark.parametrize("name", UNRUN)
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_a_task_whose_processor_returns_a_lazy_result_is_not_done(
    bench: RunnerHarness, name: str, options: Any
) -> None:
    bench.registry.processor("lazy", **options)(UNRUN[name])
    task = bench.schedule("lazy", [1])
    bench.run(task)
    ended = bench.now(task)
    assert ended.status.name == ("NOT_COMPLETE" if "retries" in options else "FAILED")
    assert "InvalidOutcomesError: the processor of 'lazy' returned" in (ended.error or "")
    assert "does not run by itself" in (ended.error or "")


@pytest.mark.parametrize("lazy", [lambda: Awaitable(), lambda: generator(1)], ids=["await", "gen"])
@pytest.mark.parametrize("form", ["list", "dict", "whole"])
def test_tasks_of_a_batch_with_lazy_results_are_not_done(
    bench: RunnerHarness, lazy: Callable[[], Any], form: str
) -> None:
    def together(tasks: list[Any]) -> Any:
        if form == "whole":
            return lazy()
        if form == "dict":
            return {tasks[0].id: lazy()}
        return [lazy(), None]

    bench.registry.processor("lazy", batch=2)(together)
    tasks = [bench.schedule("lazy") for _ in range(2)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == (["FAILED"] * 2 if form == "whole" else ["FAILED", "DONE"])
    assert InvalidOutcomesError.__name__ in (bench.now(tasks[0]).error or "")


def test_celerys_signals_see_the_failure(bench: RunnerHarness) -> None:
    from celery import Celery, signals

    app = Celery(broker="memory://nowhere", set_as_current=False)
    bench.execute = CeleryTaskContext(app, "w@host", bench.clock)  # type: ignore[method-assign]
    bench.runner = bench.make_runner()
    failures: list[BaseException] = []

    def failed(exception: BaseException, **_: Any) -> None:
        failures.append(exception)

    signals.task_failure.connect(failed)
    try:
        bench.registry.processor("lazy")(UNRUN["generator"])
        bench.run(bench.schedule("lazy"))
    finally:
        signals.task_failure.disconnect(failed)
    assert [type(failure) for failure in failures] == [InvalidOutcomesError]


@pytest.mark.parametrize(
    "value", [[1], {"n": 1}, "text", iter([1]), range(3), object()], ids=lambda v: type(v).__name__
)
def test_any_other_value_is_success(bench: RunnerHarness, value: object) -> None:
    bench.registry.processor("eager")(lambda body: value)
    task = bench.schedule("eager")
    bench.run(task)
    assert bench.now(task).status.name == "DONE"


def test_an_async_method_of_a_callable_object_runs(bench: RunnerHarness) -> None:
    ran: list[Any] = []

    class Works:
        async def __call__(self, body: Any) -> None:
            ran.append(body)

    bench.registry.processor("object")(Works())
    task = bench.schedule("object", 1)
    bench.run(task)
    assert (ran, bench.now(task).status.name) == ([1], "DONE")
