"""Processors: their handles, schemas, results and retry schedules."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import coroutine
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from delaytasks import (
    BodyRefusedError,
    ConfigError,
    DelayedTask,
    DelayTasks,
    Done,
    InvalidInputError,
    Processor,
    StaleVersionError,
)
from delaytasks.core.retry_schedule import (
    MAX_RETRY_DELAYS,
    Retries,
    RetrySchedule,
    retry_schedule_of,
)
from delaytasks.core.states import Status
from delaytasks.processors.registry import Registry
from delaytasks.runtime import runtime_of
from delaytasks.testing import create_tables
from tests.conftest import open_store
from tests.recording import delays_on, record, run_now
from tests.refusals import invalid
from tests.world import World

# -- handles --------------------------------------------------------------------------------------


AT = datetime(2031, 1, 1, tzinfo=timezone.utc)
delays = DelayTasks(Celery("handles"), "sqlite://")


@delays.processor("module.close", queue="slow")
def close_order(body: dict[str, int], task: DelayedTask | None = None) -> int:
    """Close an order."""
    return body["order"]


def test_a_handle_is_called_like_its_function_and_looks_like_it() -> None:
    assert isinstance(close_order, Processor)
    assert close_order({"order": 7}) == 7
    assert (close_order.__name__, close_order.__doc__) == ("close_order", "Close an order.")
    assert close_order.__module__ == __name__
    assert list(inspect.signature(close_order).parameters) == ["body", "task"]
    assert repr(close_order) == f"<Processor 'module.close': {__name__}.close_order>"


def test_a_handle_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(close_order)) is close_order


def test_handles_of_coroutines_and_batches_can_be_called() -> None:
    @delays.processor("module.ask")
    async def ask(body: int) -> int:
        return body + 1

    @delays.processor("module.store", batch=10)
    def store(bodies: list[int], tasks: list[DelayedTask]) -> int:
        return len(bodies)

    assert asyncio.run(ask(1)) == 2
    assert store([1, 2], []) == 2
    if sys.version_info >= (3, 12):
        assert inspect.iscoroutinefunction(ask)


def test_a_function_can_have_several_tags_and_the_registry_gets_the_function_itself() -> None:
    @delays.processor("module.one")
    @delays.processor("module.two")
    def both(body: int) -> int:
        return body

    registry = runtime_of(delays).registry
    specs = {spec.tag: spec for spec in registry}
    functions = [specs[tag].function for tag in ("module.one", "module.two")]
    assert functions[0] is functions[1] is both.function
    assert both.tag == "module.one"


def test_functions_of_classes_are_bound_as_usual() -> None:
    class Shop:
        name = "shop"

        @staticmethod
        @delays.processor("module.static")
        def static(body: str) -> str:
            return body

        @delays.processor("module.plain")
        def plain(self, body: str) -> str:
            return self.name + body

        def bound(self, body: str) -> str:
            return self.name + body

    shop: Any = Shop()
    assert Shop.static("a") == shop.static("a") == "a"
    assert shop.plain("!") == "shop!"
    assert shop.plain.tag == "module.plain"
    assert delays.processor("module.bound")(shop.bound)("?") == "shop?"


def test_a_processor_runs_the_rows_of_its_former_tags(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.sqlite3'}"
    open_store(url).close()
    delays, seen = delays_on(url), list[str]()

    @delays.processor("order.close", aliases=("close_order",), queue="orders")
    def close(body: str) -> None:
        seen.append(body)

    old = delays.schedule_delay("close_order", "old", 0)
    assert (close.tag, old.tag, old.queue) == ("order.close", "close_order", "orders")
    assert run_now(delays, old).status is Status.DONE
    assert run_now(delays, close.schedule("new", 0)).status is Status.DONE
    assert seen == ["old", "new"]
    with pytest.raises(ConfigError, match="close_order"):
        delays.processor("close_order")(lambda body: None)
    for wrong in ("close", 7, iter(["close"])):
        with invalid("aliases"):
            delays.processor("order.send", aliases=wrong)


def test_a_handle_schedules_finds_and_cancels_tasks_of_its_tag(tmp_path: Path) -> None:
    own = delays_on(f"sqlite:///{tmp_path}/tasks.sqlite3", tags=["mail.other"])
    with runtime_of(own).store.database.begin() as connection:
        create_tables(connection, own)
    record(own)

    @own.processor("mail.send", queue="mail")
    def send(body: Any) -> None: ...

    own.schedule_delay("mail.other", {}, 60)
    first = send.schedule({"n": 1}, "1h", key="1", priority=3)
    second = send.schedule({"n": 2}, at=AT)
    assert (first.tag, first.queue, first.key, first.priority) == ("mail.send", "mail", "1", 3)
    assert second.expected_time == AT
    with invalid("max_wait"):
        send.schedule({"n": 1}, 5, max_wait=5)
    assert send.schedule({"n": 3}, 5, key="1", on_conflict="keep").id == first.id
    many = [({"n": n}, timedelta(minutes=n)) for n in range(3)]
    assert send.schedule_many([*many, ({"n": 9}, AT)], queue="bulk") == 4
    assert len(send.find()) == 6
    assert len(send.find(queue="bulk", until=AT)) == 3
    assert send.schedule_many([({"n": 5}, 5)], key="1", on_conflict="keep") == 0
    with pytest.raises(StaleVersionError):
        send.cancel(key="1", version=first.version + 1)
    assert send.cancel(key="1")
    assert not send.cancel(key="1")
    with runtime_of(own).store.database.begin() as connection:
        send.schedule({"n": 4}, 5, session=connection)
        connection.rollback()
    assert len(send.find()) == 6


def test_the_module_level_decorator_makes_handles_of_the_default_instance() -> None:
    code = (
        "import delaytasks, sys\n"
        "@delaytasks.processor('a')\n"
        "def work(body): return body\n"
        "assert isinstance(work, delaytasks.Processor) and work(5) == 5\n"
        "assert 'sqlalchemy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- A processor's schema converts valid bodies and refuses invalid ones --------------------------


@dataclass
class Order:
    number: int
    note: str = ""


class Model:
    """A class with the interface of pydantic's models, because the tests do not need pydantic."""

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def model_validate(cls, body: Any) -> Model:
        return cls(int(body["number"]))

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return {"number": self.number}


def even(body: int) -> int:
    if body % 2:
        raise ValueError(f"{body} is odd")
    return body


def takes(world: World, tag: str, schema: Callable[..., Any], **options: Any) -> list[Any]:
    given: list[Any] = []
    world.delays.processor(tag, schema=schema, **options)(lambda body: given.append(body))
    return given


@pytest.mark.parametrize(
    ("schema", "body", "given"),
    [
        (Order, {"number": 7}, Order(7)),
        (Order, Order(7, "x"), Order(7, "x")),
        (even, 4, 4),
        (lambda body: body["n"], {"n": 1}, 1),
    ],
)
def test_a_processor_receives_the_body_converted_by_its_schema(
    world: World, schema: Any, body: Any, given: Any
) -> None:
    seen = takes(world, "order", schema)
    world.run(world.schedule("order", body))
    assert seen == [given]


def test_a_model_is_stored_as_it_dumps_itself_and_read_again(world: World) -> None:
    seen = takes(world, "order", Model)
    task = world.schedule("order", Model(7))
    assert task.body == {"number": 7}
    world.run(task)
    assert seen[0].number == 7


def test_a_dataclass_needs_no_schema_to_be_scheduled(world: World) -> None:
    assert world.schedule("note", Order(7)).body == {"number": 7, "note": ""}
    with invalid("body"):
        world.schedule("note", Order)


@pytest.mark.parametrize(
    ("schema", "body"),
    [(Order, {"nummer": 7}), (Order, [7]), (Order, None), (even, 3), (even, "x"), (Model, {})],
)
def test_a_body_that_is_refused_is_not_scheduled(world: World, schema: Any, body: Any) -> None:
    takes(world, "order", schema)
    with pytest.raises(BodyRefusedError, match="refuses the body of a task of tag 'order'"):
        world.schedule("order", body)
    assert not any(world.counted().values())


def test_a_body_that_the_schema_refuses_fails_without_a_retry(world: World) -> None:
    task = world.schedule("order", {"nummer": 7})
    seen = takes(world, "order", Order, retries="10s 10s")
    world.run(task)
    assert (seen, world.read(task).status) == ([], Status.FAILED)
    assert "BodyRefusedError: Order refuses" in (world.read(task).error or "")


# -- A task is not DONE if the code of its processor did not run ----------------------------------


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
    world: World, name: str, options: Any
) -> None:
    world.delays.processor("lazy", **options)(UNRUN[name])
    task = world.schedule("lazy", [1])
    world.run(task)
    ended = world.read(task)
    assert ended.status.name == ("NOT_COMPLETE" if "retries" in options else "FAILED")
    assert "InvalidInputError: the processor of 'lazy' returned" in (ended.error or "")
    assert "does not run by itself" in (ended.error or "")


@pytest.mark.parametrize("lazy", [lambda: Awaitable(), lambda: generator(1)], ids=["await", "gen"])
@pytest.mark.parametrize("form", ["list", "dict", "whole"])
def test_tasks_of_a_batch_with_lazy_results_are_not_done(
    world: World, lazy: Callable[[], Any], form: str
) -> None:
    def together(tasks: list[Any]) -> Any:
        if form == "whole":
            return lazy()
        if form == "dict":
            return {tasks[0].id: lazy()}
        return [lazy(), None]

    world.delays.processor("lazy", batch=2)(together)
    tasks = [world.schedule("lazy") for _ in range(2)]
    world.run(*tasks)
    assert world.statuses(tasks) == (["FAILED"] * 2 if form == "whole" else ["FAILED", "DONE"])
    assert "InvalidInputError: the" in (world.read(tasks[0]).error or "")


def test_celerys_signals_see_the_failure(world: World) -> None:
    from celery import signals

    failures: list[BaseException] = []

    def failed(exception: BaseException, **_: Any) -> None:
        failures.append(exception)

    signals.task_failure.connect(failed)
    try:
        world.delays.processor("lazy")(UNRUN["generator"])
        world.run(world.schedule("lazy"))
    finally:
        signals.task_failure.disconnect(failed)
    assert [type(failure) for failure in failures] == [InvalidInputError]


@pytest.mark.parametrize(
    "value", [[1], {"n": 1}, "text", iter([1]), range(3), object()], ids=lambda v: type(v).__name__
)
def test_any_other_value_is_success(world: World, value: object) -> None:
    world.delays.processor("eager")(lambda body: value)
    task = world.schedule("eager")
    world.run(task)
    assert world.read(task).status.name == "DONE"


def test_an_async_method_of_a_callable_object_runs(world: World) -> None:
    ran: list[Any] = []

    class Works:
        async def __call__(self, body: Any) -> None:
            ran.append(body)

    world.delays.processor("object")(Works())
    task = world.schedule("object", 1)
    world.run(task)
    assert (ran, world.read(task).status.name) == ([1], "DONE")


# -- retry schedules: their retry delays, their text, and which schedule an error selects ---------


def test_a_retry_schedule_is_written_as_durations() -> None:
    retry_schedule = RetrySchedule("15s 3m 1h30m")
    assert retry_schedule.retry_delays_s == (15, 180, 5400)
    assert retry_schedule == RetrySchedule([15, "3m", timedelta(minutes=90)])


def test_a_retry_schedule_of_n_delays_has_n_waits() -> None:
    retry_schedule = RetrySchedule("1s 2s")
    assert [retry_schedule.wait_s(failures) for failures in (1, 2, 3, 4)] == [1, 2, None, None]
    assert [retry_schedule.has_retry_delay(failures) for failures in (1, 2, 3)] == [
        True,
        True,
        False,
    ]


def test_exponential_waits_grow_to_their_cap() -> None:
    assert RetrySchedule.exponential("1s", times=6, cap="10s", jitter=0).retry_delays_s == (
        1,
        2,
        4,
        8,
        10,
        10,
    )
    assert RetrySchedule.fixed("5s", times=3).retry_delays_s == (5, 5, 5)


@given(st.floats(0, 1), st.integers(1, 9))
def test_jitter_stays_within_its_share(jitter: float, failures: int) -> None:
    wait = RetrySchedule(RetrySchedule.NOTIFY.retry_delays_s, jitter=jitter).wait_s(failures)
    retry_delay = RetrySchedule.NOTIFY.retry_delays_s[failures - 1]
    assert wait is not None
    assert retry_delay * (1 - jitter) - 1e-6 <= wait <= retry_delay * (1 + jitter) + 1e-6


def test_jitter_spreads_the_retries_of_tasks_that_failed_together() -> None:
    retry_schedule = RetrySchedule("1h", jitter=0.5)
    assert len({retry_schedule.wait_s(1) for _ in range(20)}) > 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetrySchedule(""),
        lambda: RetrySchedule("soon"),
        lambda: RetrySchedule("-5s"),
        lambda: RetrySchedule([float("nan")]),
        lambda: RetrySchedule([True]),
        lambda: RetrySchedule([1] * (MAX_RETRY_DELAYS + 1)),
        lambda: RetrySchedule("1s", jitter=2),
        lambda: RetrySchedule.fixed("1s", times=0),
        lambda: RetrySchedule.exponential("1s", times=2, factor=0.5),
        lambda: RetrySchedule.exponential("1s", times=2, cap="400d"),
        lambda: Retries.of({"ValueError": "1s"}),
        lambda: Retries.of({ValueError: "soon"}),
    ],
)
def test_an_invalid_retry_schedule_is_refused(make: Any) -> None:
    with pytest.raises(InvalidInputError):
        make()


def test_a_number_of_retries_has_the_default_delays() -> None:
    assert retry_schedule_of(3) == RetrySchedule("5s 30s 1m")
    assert retry_schedule_of(11) == RetrySchedule("5s 30s 1m 10m 30m 1h 6h 1d 2d 2d 2d")
    assert Retries.of(1).retry_schedule_for(ValueError) == RetrySchedule("5s")
    assert Retries.of({OSError: 2, Exception: None}).retry_schedule_for(
        ConnectionError
    ) == RetrySchedule("5s 30s")


@pytest.mark.parametrize("retry", [True, False, 0, -1, 1.5, MAX_RETRY_DELAYS + 1, object(), b"15s"])
def test_an_invalid_number_of_retries_is_refused_with_the_remedy(retry: Any) -> None:
    for make in (lambda: Retries.of(retry), lambda: Retries.of({ValueError: retry})):
        with invalid("retry_delays" if retry == b"15s" else "retries", match="15s 3m"):
            make()
    with invalid("retry_delays", match="15s 3m"):
        RetrySchedule(retry)


def test_the_nearest_class_of_an_error_selects_the_retry_schedule() -> None:
    retries = Retries.of(
        {OSError: "1s", ConnectionError: "2s", ValueError: None, Exception: RetrySchedule.NOTIFY}
    )
    assert retries.retry_schedule_for(ConnectionResetError) == RetrySchedule("2s")
    assert retries.retry_schedule_for(FileNotFoundError) == RetrySchedule("1s")
    assert retries.retry_schedule_for(UnicodeDecodeError) is None
    assert retries.retry_schedule_for(KeyError) is RetrySchedule.NOTIFY
    assert retries.retry_schedule_for(SystemExit) is None


def test_a_tasks_own_retry_schedule_does_not_retry_errors_that_its_tag_excludes() -> None:
    retries, own = Retries.of({ValueError: None, Exception: "1s"}), RetrySchedule("9s")
    assert retries.retry_schedule_for(KeyError, own) is own
    assert retries.retry_schedule_for(ValueError, own) is None
    assert Retries.of(None).retry_schedule_for(KeyError, own) is own
