"""Processors: their handles, schemas, results and retry schedules."""

from __future__ import annotations

import functools
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace, coroutine
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu import Exchange, Queue

import delaytasks
from delaytasks import DelayedTask, DelayTasks, Done, RetrySchedule
from tests.refusals import invalid
from tests.world import MakeWorld, World, served_queues

# -- handles --------------------------------------------------------------------------------------


AT = datetime(2031, 1, 1, tzinfo=timezone.utc)
delays = DelayTasks(Celery("handles"), "sqlite://")


@delays.processor("module.close", queue="slow")
def close_order(body: dict[str, int], task: DelayedTask | None = None) -> int:
    """Close an order."""
    return body["order"]


def test_a_handle_looks_like_its_function_and_is_called_and_pickled_like_it() -> None:
    assert isinstance(close_order, delaytasks.Processor)
    assert close_order({"order": 7}) == 7
    assert (close_order.__name__, close_order.__doc__) == ("close_order", "Close an order.")
    assert list(inspect.signature(close_order).parameters) == ["body", "task"]
    assert repr(close_order) == f"<Processor 'module.close': {__name__}.close_order>"
    assert pickle.loads(pickle.dumps(close_order)) is close_order


def test_a_processor_runs_the_rows_of_its_tags_and_its_former_tags(world: World) -> None:
    two = world.delays.processor("two")(world.notes.append)
    options: Any = {"aliases": ("close_order",), "queue": "orders"}
    close = world.delays.processor("order.close", **options)(two)
    old, *others = (world.schedule(tag, tag) for tag in ("close_order", "order.close", "two"))
    assert (close.tag, old.tag, old.queue) == ("order.close", "close_order", "orders")
    world.run(old, *others)
    assert world.notes == ["close_order", "order.close", "two"]
    with pytest.raises(delaytasks.ConfigError, match="close_order"):
        world.delays.processor("close_order")(lambda body: None)
    for wrong in ("close", 7, iter(["close"])):
        with invalid("aliases"):
            world.delays.processor("order.send", aliases=wrong)


def test_a_handle_schedules_tasks_of_its_tag(world: World) -> None:
    send = world.delays.processor("mail.send", queue="mail")(world.notes.append)
    world.schedule("mail.other")
    first = send.schedule({"n": 1}, "1h", key="1", priority=3)
    assert (first.tag, first.queue, first.key, first.priority) == ("mail.send", "mail", "1", 3)
    assert send.schedule({"n": 2}, at=AT).expected_time == AT
    assert send.schedule({"n": 3}, 5, key="1", on_conflict="keep").id == first.id
    many = [({"n": n}, timedelta(minutes=n)) for n in range(3)]
    assert send.schedule_many([*many, ({"n": 9}, AT)], queue="bulk") == 4
    assert len(world.delays.find(queue="bulk", until=AT)) == 3
    assert send.schedule_many([({"n": 5}, 5)], key="1", on_conflict="keep") == 0
    with world.begin() as connection:
        send.schedule({"n": 4}, 5, session=connection)
        connection.rollback()
    assert len(world.delays.find(tag="mail.send")) == 6


# -- A processor's schema converts valid bodies and refuses invalid ones --------------------------


@dataclass
class Order:
    number: int
    note: str = ""


class Model(SimpleNamespace):
    """A class with the interface of pydantic's models, because the tests do not need pydantic."""

    @classmethod
    def model_validate(cls, body: Any) -> Model:
        return cls(number=int(body["number"]))

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return vars(self)


def even(body: int) -> int:
    if body % 2:
        raise ValueError(f"{body} is odd")
    return body


#: A schema, what is scheduled, what is stored, and what the processor gets.
SCHEMAS: list[tuple[Any, ...]] = [
    (Order, {"number": 7}, {"number": 7}, Order(7)),
    (Order, Order(7, "x"), {"number": 7, "note": "x"}, Order(7, "x")),
    (Model, Model(number=7), {"number": 7}, Model(number=7)),
    (even, 4, 4, 4),
    (lambda body: body["n"], {"n": 1}, {"n": 1}, 1),
    (None, Order(7), {"number": 7, "note": ""}, {"number": 7, "note": ""}),
]


@pytest.mark.parametrize(("schema", "body", "stored", "given"), SCHEMAS)
def test_a_schema_converts_the_body(
    world: World, schema: Any, body: Any, stored: Any, given: Any
) -> None:
    world.delays.processor("order", schema=schema)(world.notes.append)
    task = world.schedule("order", body)
    world.run(task)
    assert (task.body, world.notes) == (stored, [given])


BODIES: list[Any] = [(Order, {"nummer": 7}), (Order, [7]), (Order, None), (even, 3), (even, "x")]


@pytest.mark.parametrize(("schema", "body"), [*BODIES, (Model, {})])
def test_a_body_that_is_refused_is_neither_scheduled_nor_retried(
    world: World, schema: Any, body: Any
) -> None:
    before = world.schedule("order", body)
    world.delays.processor("order", schema=schema, retries="10s 10s")(world.notes.append)
    with pytest.raises(delaytasks.BodyRefusedError, match="refuses the body of a task of tag 'or"):
        world.schedule("order", body)
    with invalid("body"):
        world.schedule("note", Order)
    world.run(before)
    assert (sum(world.counted().values()), world.statuses([before])) == (1, ["FAILED"])
    assert world.notes == []
    assert f"BodyRefusedError: {schema.__name__} refuses" in (world.read(before).error or "")


# -- A task is not DONE if the code of its processor did not run ----------------------------------


def generator(body: Any) -> Any:
    yield body


async def async_generator(body: Any) -> Any:
    yield body


@coroutine
def old_coroutine(body: Any) -> Any:
    yield from ()


class Methods:
    def __call__(self, body: Any) -> Any:
        yield body

    async def asynchronous(self, body: Any) -> Any:
        yield body


REFUSED: dict[str, Callable[..., Any]] = {
    "coroutine of the old kind": old_coroutine,
    "partial of an async generator": functools.partial(async_generator),
    "callable object": Methods(),
    "callable object, async": type("Called", (), {"__call__": Methods.asynchronous})(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_generator_function_is_no_processor(name: str) -> None:
    kinds: list[dict[str, Any]] = [{}, {"batch": 5}, {"in_flight": 5}]
    for options in kinds:
        with pytest.raises(TypeError, match="contains `yield`") as raised:
            delays.processor("lazy", **options)(REFUSED[name])
        assert "return" in str(raised.value), "it states the remedy"
    with pytest.raises(delaytasks.UnknownTagError):
        delays.schedule_delay("lazy", {}, 5)


class Awaitable:
    def __await__(self) -> Iterator[Any]:
        yield from ()


async def returns_a_generator(body: Any) -> Any:
    return Done(generator(body)) if body else generator(body)


UNRUN: dict[str, Callable[[Any], Any]] = {
    "generator": lambda body: generator(body),
    "async generator": lambda body: async_generator(body),
    "map": lambda body: map(print, [body]),
    "awaitable": lambda body: Awaitable(),
    "coroutine of the old kind": lambda body: old_coroutine(body),
    "a generator, from a coroutine": returns_a_generator,
    "an awaitable as a result": lambda body: Done(Awaitable()),
}
FORMS: list[dict[str, Any]] = [{}, {"in_flight": 5}, {"keep_result": True}, {"retries": "1m"}]


@pytest.mark.parametrize("name", UNRUN)
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_a_task_with_a_lazy_result_is_not_done(world: World, name: str, options: Any) -> None:
    world.delays.processor("lazy", **options)(UNRUN[name])
    world.run(*(tasks := [world.schedule("lazy", body) for body in (0, 1)]))
    for ended in map(world.read, tasks):
        assert ended.status.name == ("NOT_COMPLETE" if "retries" in options else "FAILED")
        assert "InvalidInputError: the processor of 'lazy' returned" in (ended.error or "")
        assert "does not run by itself" in (ended.error or "")


@pytest.mark.parametrize("form", ["list", "dict", "whole"])
def test_lazy_results_of_batches_are_not_done(world: World, form: str) -> None:
    def together(tasks: list[Any]) -> Any:
        forms: dict[str, Any] = {"list": [generator(1), None], "whole": Awaitable()}
        return forms.get(form, {tasks[0].id: Awaitable()})

    world.delays.processor("lazy", batch=2)(together)
    world.run(*(tasks := [world.schedule("lazy") for _ in range(2)]))
    assert world.statuses(tasks) == (["FAILED"] * 2 if form == "whole" else ["FAILED", "DONE"])
    assert "InvalidInputError: the" in (world.read(tasks[0]).error or "")


# -- retry schedules: their retry delays, their text, and which schedule an error selects ---------


def test_a_retry_schedule_is_written_as_durations_or_as_a_number(world: World) -> None:
    retry_schedule = RetrySchedule("15s 3m 1h30m")
    assert retry_schedule.retry_delays_s == (15, 180, 5400)
    assert str(retry_schedule) == "15s 3m 1h30m"
    assert retry_schedule == RetrySchedule([15, "3m", timedelta(minutes=90)])
    for number, usual in ((3, "5s 30s 1m"), (11, "5s 30s 1m 10m 30m 1h 6h 1d 2d 2d 2d")):
        assert world.schedule(retries=number).retry_schedule == RetrySchedule(usual)


@given(st.floats(0, 1), st.integers(1, 9))
def test_a_retry_delay_varies_within_its_share(variation: float, failures: int) -> None:
    """So that tasks which failed together are not retried together."""
    schedule = RetrySchedule(RetrySchedule.NOTIFY.retry_delays_s, variation=variation)
    waits = {schedule.wait_s(failures) or 0.0 for _ in range(20)}
    delay = RetrySchedule.NOTIFY.retry_delays_s[failures - 1]
    assert delay * (1 - variation) - 1e-6 <= min(waits) <= max(waits)
    assert max(waits) <= delay * (1 + variation) + 1e-6
    assert len(waits) > 10 or variation < 1e-6


BY_ERROR: Any = {OSError: "10s", ConnectionError: "20s", ValueError: None, Exception: "30s"}
#: The error of a run, the option `retries` of the processor and of the task, and the delay of the
#: retry, or None if the task has failed.
RETRIES: list[tuple[BaseException, Any, str | None, float | None]] = [
    (ConnectionResetError(), BY_ERROR, None, 20),
    (FileNotFoundError(), BY_ERROR, None, 10),
    (KeyError(), BY_ERROR, None, 30),
    (UnicodeError(), BY_ERROR, None, None),
    (SystemExit(), BY_ERROR, None, None),
    (ConnectionError(), {OSError: 2, Exception: None}, None, 5),
    (KeyError(), BY_ERROR, "90s", 90),
    (ValueError(), BY_ERROR, "90s", None),
    (KeyError(), None, "90s", 90),
    (SystemExit(), None, "90s", None),
    (SystemExit(), "1m", None, None),
    (SystemExit(), {SystemExit: "1m"}, "90s", 90),
    (delaytasks.BodyRefusedError("no", "body"), {BaseException: "1m"}, "90s", None),
]


@pytest.mark.parametrize(("error", "retries", "own", "wait_s"), RETRIES, ids=repr)
def test_the_nearest_class_of_an_error_selects_the_delay_of_the_retry(
    world: World, error: BaseException, retries: Any, own: str | None, wait_s: float | None
) -> None:
    """The schedule of a task replaces that of its tag, except for errors that are not retried."""

    def fail(body: Any) -> None:
        raise error

    world.delays.processor("fail", retries=retries)(fail)
    world.run(task := world.schedule("fail", retries=own))
    after = world.read(task)
    assert after.status.name == ("FAILED" if wait_s is None else "NOT_COMPLETE")
    if wait_s is not None:
        away_s = (after.expected_time - world.now()).total_seconds()
        assert away_s == pytest.approx(wait_s, abs=2)


# -- the queue of a tag, and careless settings that do not disturb workers or beat -----------------


MAPPING = {"*": "rest", "mail.*": "mail", "mail.bulk.*": "bulk", "report.daily": "slow"}
MAPPING |= {"report.?????": "short", "sms.[ab]": "sms", "sms.*": "other"}
QUEUES = {"mail.send": "mail", "mail.bulk.send": "bulk", "mail": "rest", "Mail.send": "rest"}
QUEUES |= {"report.daily": "slow", "report.other": "short", "report.daily.too": "rest"}
QUEUES |= {"sms.a": "sms", "sms.c": "other"}


def test_a_tag_uses_its_queue_or_the_best_pattern(make_world: MakeWorld) -> None:
    world = make_world(queues=MAPPING)
    assert {tag: world.schedule(tag).queue for tag in QUEUES} == QUEUES
    patterns = {"a.*": "x", "*.b": "y"}
    for queues, queue in ((patterns, "x"), (dict(reversed(patterns.items())), "y")):
        assert make_world(queues=queues).schedule("a.b").queue == queue
    # A call overrides a processor, and a processor the mapping.
    world.delays.processor("mail.send", queue="own")(world.notes.append)
    assert world.schedule("mail.send").queue == "own"
    assert world.schedule("mail.send", queue="asked").queue == "asked"


def make_delays(conf: Mapping[str, Any] | None = None, **settings: Any) -> DelayTasks:
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.update(conf or {})
    return DelayTasks(app, "sqlite://", **settings)


def test_a_worker_without_a_choice_serves_all_queues_that_a_tag_may_have() -> None:
    delays = make_delays(queues={"mail.*": "mail", "*": "usual"})
    delays.processor("report.make", queue="slow")(lambda body: None)
    assert served_queues(delays)[0] == ["default", "mail", "slow", "usual"]


#: What a worker serves that runs with `-Q`: our queues, and the names of all that it consumes.
CHOSEN: list[Any] = [("mail", ["mail"], {"mail", "delaytasks.mail"}), ("a b", [], {"a b"})]
CHOSEN += [("delaytasks.mail", ["mail"], {"delaytasks.mail"}), ("celery", [], {"celery"})]
CHOSEN += [("other", ["other"], {"other", "delaytasks.other"})]
CHOSEN += [("delaytasks.other", ["other"], {"delaytasks.other"})]


@pytest.mark.parametrize(("chosen", "ours", "consumed"), CHOSEN)
def test_a_choice_holds_with_or_without_the_prefix(chosen: str, ours: Any, consumed: Any) -> None:
    """It also serves queues that only calls name."""
    delays = make_delays(queues={"mail.*": "mail", "sms.*": "sms"})
    assert served_queues(delays, chosen) == (ours, consumed)


@pytest.mark.parametrize("queues", [[Queue("reports")], {"reports": {}}])
def test_a_chosen_queue_that_the_app_declares_is_not_taken_for_ours(queues: Any) -> None:
    assert served_queues(make_delays({"task_queues": queues}), "reports")[0] == []


PLACE = {"exchange": "foo", "routing_key": "bar"}
CONFS: list[dict[str, Any]] = [
    {"task_annotations": {"*": {"serializer": "pickle"}}},
    {"task_annotations": {"*": PLACE}},
    {"task_routes": {"*": PLACE}},
    {"task_routes": {"*": {"exchange": "foo", "exchange_type": "topic", "serializer": "pickle"}}},
    {"task_serializer": "pickle"},
]


@pytest.mark.parametrize("conf", CONFS)
def test_a_sweep_message_arrives_with_any_task_settings_of_the_app(conf: dict[str, Any]) -> None:
    app = make_delays(conf)._celery
    queue = Queue("delaytasks.default", Exchange("delaytasks.default"), "delaytasks.default")
    app.amqp.queues.add(queue)
    with app.connection_for_write() as connection:
        bound = queue(connection.default_channel)
        bound.declare()
        bound.purge()
        # Beat sends the same message.
        app.tasks["delaytasks.sweep"].apply_async((0,), queue=queue.name)
        message = bound.get(no_ack=True, accept=["json"])
        assert message is not None
        assert message.payload[0] == [0]


# -- Django --------------------------------------------------------------------------------------


def test_a_django_project_without_views_needs_no_root_urlconf() -> None:
    program = (
        "from django.conf import settings; settings.configure(); "
        "from delaytasks.contrib.django.instance import _celery_app; print(_celery_app(None).main)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "django", done.stderr
