"""Celery exposes the row whose processor runs, and its signals and retries work."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from threading import Thread
from traceback import extract_tb
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, Task, current_task, signals
from celery._state import _task_stack, get_current_task, get_current_worker_task
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry

from delaytasks import Cancel, DelayedTask, Done, Fail, Retry, Snooze
from delaytasks.core.interfaces import Settlement
from delaytasks.core.workers import NO_RENEWAL
from delaytasks.execution.executor import Lease, ProcessorCall, RunResult, TaskRun
from delaytasks.processors.registry import EventLoop, ProcessorSpec, Registry, result_of
from delaytasks.worker.celery_context import CeleryTaskContext, row_in_context
from tests.recording import ManualClock
from tests.world import World

# -- celery exposes the row whose processor is running --------------------------------------------


DUE = datetime(2026, 11, 21, tzinfo=timezone.utc)
Seen = list[tuple[str, str, int]]


def task_of(number: int, tag: str = "a", runs: int = 1) -> DelayedTask:
    return DelayedTask(number, tag, '{"n": 1}', DUE, queue="mail", priority=3, runs=runs)


def look(seen: Seen) -> Callable[[Any], None]:
    def note(body: Any) -> None:
        request = current_task.request
        seen.append((current_task.name, request.id, request.retries))

    return note


def end(value: object, error: BaseException | None) -> Sequence[RunResult]:
    """Settle a row as succeeded unless its processor raised an error."""
    if error is not None:
        raise error
    return [RunResult(Settlement(task_of(0), "succeed"), value)]


@pytest.fixture
def task_context() -> Iterator[CeleryTaskContext]:
    yield CeleryTaskContext(Celery(set_as_current=False), "w@host", ManualClock(DUE))
    assert not _task_stack.stack, "nothing is left behind"
    assert row_in_context.get(None) is None


def processor(tag: str, function: Callable[[Any], object]) -> ProcessorSpec:
    registry = Registry()
    registry.processor(tag)(function)
    found = registry.get(tag)
    assert found is not None
    return found


NO_LEASE = Lease(60, 0.05, lambda: NO_RENEWAL, lambda id, version: False)


def call(processor: ProcessorSpec, task: DelayedTask) -> ProcessorCall:
    run = TaskRun(task, Mock(), lambda session, task: None, NO_LEASE)
    return ProcessorCall(processor, [run])


@pytest.mark.parametrize("is_kept", [False, True])
def test_each_row_has_its_own_request(task_context: CeleryTaskContext, is_kept: bool) -> None:
    seen: Seen = []
    a, b = processor("a", look(seen)), processor("b", look(seen))
    rows = [(a, task_of(1)), (a, task_of(2, runs=4)), (b, task_of(3, "b")), (a, task_of(4))]

    def run_all() -> None:
        for work, task in rows:
            task_context(call(work, task), end)

    if is_kept:
        with task_context.reuse_stack():
            run_all()
    else:
        run_all()
    assert seen == [("a", "1", 0), ("a", "2", 3), ("b", "3", 0), ("a", "4", 0)]
    assert not _task_stack.stack


def test_a_request_has_the_attributes_of_a_request_of_celery(
    task_context: CeleryTaskContext,
) -> None:
    requests: list[Any] = []
    work = processor("a", lambda body: requests.append(current_task.request))
    with task_context.reuse_stack():
        task_context(call(work, task_of(1, runs=2)), end)
        task_context(call(work, task_of(2)), end)
    first, second = requests
    assert first is not second
    assert (first.id, first.root_id, first.hostname, first.args, first.kwargs) == (
        "1",
        "1",
        "w@host",
        ({"n": 1},),
        {},
    )
    assert first.delivery_info == {"routing_key": "mail", "priority": 3, "redelivered": True}
    assert second.delivery_info["redelivered"] is False
    assert first.eta == DUE.isoformat()
    assert first.delay_task.id == 1
    assert first.task == "a"
    assert not first.is_eager
    assert not first.called_directly
    assert first.as_execution_options()["headers"] == {}


def test_the_headers_of_a_request_are_the_meta(task_context: CeleryTaskContext) -> None:
    """Datadog finds the trace of the caller there."""
    seen: list[Any] = []
    work = processor("a", lambda body: seen.append(current_task.request.headers))
    task_context(call(work, replace(task_of(1), meta_json='{"traceparent":"00-1"}')), end)
    assert seen == [{"traceparent": "00-1"}]


def test_rows_that_raise_leave_no_request_on_the_stack(task_context: CeleryTaskContext) -> None:
    def fail(body: Any) -> None:
        raise SystemExit

    with pytest.raises(SystemExit), task_context.reuse_stack():
        task_context(call(processor("a", fail), task_of(1)), end)


def test_a_kept_request_of_one_thread_is_not_visible_in_another(
    task_context: CeleryTaskContext,
) -> None:
    seen: Seen = []
    work = processor("a", look(seen))
    with task_context.reuse_stack():
        task_context(call(work, task_of(1)), end)
        other = Thread(target=task_context, args=(call(work, task_of(2)), end))
        other.start()
        other.join()
        task_context(call(work, task_of(3)), end)
    assert [id for _, id, _ in seen] == ["1", "2", "3"]


def test_rows_run_within_a_row_have_their_own_requests(task_context: CeleryTaskContext) -> None:
    seen: Seen = []
    inner = processor("b", look(seen))

    def outer(body: Any) -> None:
        with task_context.reuse_stack():
            task_context(call(inner, task_of(2, "b")), end)
        look(seen)(body)

    with task_context.reuse_stack():
        task_context(call(processor("a", outer), task_of(1)), end)
        task_context(call(inner, task_of(3, "b")), end)
    assert [id for _, id, _ in seen] == ["2", "1", "3"]


# -- celery's signals and events report the same outcome as the row itself ------------------------


ENDS = {
    "success": signals.task_success,
    "failure": signals.task_failure,
    "retry": signals.task_retry,
    "revoked": signals.task_revoked,
}


class Watching:
    """Record the moves that a runner reports."""

    def __init__(self) -> None:
        self.moves: dict[str, str] = {}

    def started(self, *_: Any) -> None: ...
    def expired(self, *_: Any) -> None: ...
    def defer(self, *_: Any) -> None: ...
    def flush(self) -> None: ...

    def ended(self, ending: Settlement, *_: Any) -> None:
        self.moves[str(ending.task.id)] = ending.move


class Signals:
    """Record the signals that Celery sends, by the id of the row."""

    def __init__(self) -> None:
        self.ends: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.states: dict[str, str] = {}
        self.began: list[str] = []
        self._made: list[tuple[Any, Any]] = []
        for name, signal in ENDS.items():
            self._connect(signal, self._noting(name))
        self._connect(signals.task_prerun, lambda task_id, **_: self.began.append(task_id))
        self._connect(
            signals.task_postrun, lambda task_id, state, **_: self.states.update({task_id: state})
        )

    def _connect(self, signal: Any, receiver: Any) -> None:
        signal.connect(receiver, weak=False)
        self._made.append((signal, receiver))

    def _noting(self, name: str) -> Callable[..., None]:
        def note(sender: Any, **fields: Any) -> None:
            request = fields.get("request", sender.request)
            assert fields.get("task_id", request.id) == request.id
            self.ends.setdefault(request.id, []).append((name, fields))

        return note

    def close(self) -> None:
        for signal, receiver in self._made:
            signal.disconnect(receiver)

    def name(self, task: DelayedTask) -> str:
        [(name, _)] = self.ends[str(task.id)]
        return name

    def fields(self, task: DelayedTask) -> dict[str, Any]:
        return self.ends[str(task.id)][0][1]


@pytest.fixture
def sent() -> Iterator[Signals]:
    made = Signals()
    yield made
    made.close()


def raise_error(body: Any) -> None:
    raise ValueError("no")


#: Each entry has the function of a processor with the retry schedule "1h", whether its schedule is
#: used up, the expected signal and the expected status.
OUTCOMES = {
    "returns None": (lambda: None, False, "success", "DONE"),
    "Done": (lambda: Done({"n": 1}), False, "success", "DONE"),
    "Fail": (lambda: Fail("broken"), False, "failure", "FAILED"),
    "Retry": (lambda: Retry(reason="busy"), False, "retry", "NOT_COMPLETE"),
    "Retry after": (lambda: Retry(after="5m"), False, "retry", "NOT_COMPLETE"),
    "Retry, the last time": (lambda: Retry(reason="busy"), True, "failure", "FAILED"),
    "Snooze": (lambda: Snooze("5m"), False, "retry", "NOT_COMPLETE"),
    "Cancel": (lambda: Cancel("not needed"), False, "revoked", "CANCELLED"),
    "raises": (lambda: raise_error(None), False, "retry", "NOT_COMPLETE"),
    "raises, the last time": (lambda: raise_error(None), True, "failure", "FAILED"),
    "exits": (lambda: exit_politely(), True, "failure", "FAILED"),
}
STATES = {"success": "SUCCESS", "failure": "FAILURE", "retry": "RETRY", "revoked": "REVOKED"}


def exit_politely() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("outcome", ["Fail", "raises, the last time"])
def test_a_failure_is_reported_while_its_exception_is_handled(
    world: World, sent: Signals, outcome: str
) -> None:
    """Elastic APM calls `sys.exc_info()` in its receiver, and names the function of the task."""
    seen = []

    def look(sender: Any, exception: BaseException, traceback: Any, **_: Any) -> None:
        names = [frame.name for frame in extract_tb(exception.__traceback__)]
        seen.append((sys.exc_info()[1] is exception, traceback, names[-1], sender.__name__))

    sent._connect(signals.task_failure, look)

    def close_order(body: Any) -> Any:
        return OUTCOMES[outcome][0]()

    world.delays.processor("one")(close_order)
    world.run(world.schedule("one", 7))
    [(is_handled, traceback, innermost, name)] = seen
    assert is_handled
    assert traceback is not None
    assert (innermost == "raise_error") == (outcome != "Fail")
    assert "_send_failure" not in {frame.name for frame in extract_tb(traceback)}
    assert name == "close_order"
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize("mode", ["single", "batch", "in_flight"])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_each_signal_has_the_outcome_of_the_row(
    world: World, sent: Signals, outcome: str, mode: str
) -> None:
    ends, is_last, signal, status = OUTCOMES[outcome]
    options: dict[str, Any] = {"batch": {"batch": 10}, "in_flight": {"in_flight": 5}}.get(mode, {})
    world.delays.processor("one", retries="1h", **options)(lambda given: ends())
    watching = Watching()
    world.worker(watcher=watching)
    tasks = [world.schedule("one", number) for number in range(3)]
    for task in tasks:
        if is_last:
            world.change(task, runs=1)
    world.run(*tasks)
    assert world.statuses(tasks) == [status] * 3
    assert [sent.name(task) for task in tasks] == [signal] * 3
    assert len(watching.moves) == 3
    called = tasks[:1] if mode == "batch" else tasks
    assert sorted(sent.began) == sorted(str(task.id) for task in called)
    assert sent.states == {str(task.id): STATES[signal] for task in called}


def test_each_task_of_a_batch_has_its_own_signal(world: World, sent: Signals) -> None:
    def work(tasks: list[DelayedTask]) -> dict[int, Any]:
        return {task.id: outcome for task, outcome in zip(tasks, ends, strict=True)}

    ends = [None, Fail("broken"), Retry("5m"), Cancel("not needed"), Done(7)]
    world.delays.processor("batch", batch=10)(work)
    tasks = [world.schedule("batch", number) for number in range(len(ends))]
    world.run(*tasks)
    assert [sent.name(task) for task in tasks] == [
        "success",
        "failure",
        "retry",
        "revoked",
        "success",
    ]
    assert str(sent.fields(tasks[1])["exception"]) == "broken"
    assert sent.fields(tasks[4])["result"] == 7
    assert sent.states == {str(tasks[0].id): "SUCCESS"}, (
        "there is one call, which has the first task's request"
    )


@pytest.mark.parametrize("options", [{}, {"batch": 10}, {"in_flight": 5}])
def test_an_unreadable_body_is_signalled_as_a_failure(
    world: World, sent: Signals, options: Any
) -> None:
    world.delays.processor("one", **options)(lambda given: None)
    good, bad = world.schedule("one", 1), world.schedule("one", 2)
    world.change(bad, message_body="{nope")
    world.run(good, bad)
    assert world.statuses([good, bad]) == ["DONE", "FAILED"]
    assert (sent.name(good), sent.name(bad)) == ("success", "failure")
    assert sent.states[str(bad.id)] == "FAILURE"


def test_signals_have_the_arguments_that_receivers_use(world: World, sent: Signals) -> None:
    world.delays.processor("fail")(lambda body: Fail("the card was refused"))
    world.delays.processor("retry")(lambda body: Retry("5m", "busy"))
    world.delays.processor("raise")(raise_error)
    fail, retry, raises = (
        world.schedule("fail", 7),
        world.schedule("retry"),
        world.schedule("raise"),
    )
    world.run(fail, retry, raises)
    failure = sent.fields(fail)
    assert str(failure["exception"]) == "the card was refused"
    assert failure["args"] == (7,)
    assert failure["traceback"] is not None
    assert "the card was refused" in failure["einfo"].traceback
    assert "busy" in str(sent.fields(retry)["reason"])
    assert sent.fields(retry)["request"].id == str(retry.id)
    raised = sent.fields(raises)
    assert isinstance(raised["exception"], ValueError)
    assert "raise_error" in raised["einfo"].traceback


# -- celery retry ---------------------------------------------------------------------------------


CELERYS_WAIT = timedelta(seconds=180)


@pytest.fixture
def app() -> Celery:
    """Return an app whose broker does not exist, so that publishing a message fails."""
    return Celery(broker="memory://nowhere", set_as_current=False)


_numbers = itertools.count()


def run(world: World, function: Callable[[], Any], runs: int = 0, **options: Any) -> DelayedTask:
    """Run a task that has already run `runs` times, and return the stored task."""
    tag = f"celery-{next(_numbers)}"
    world.delays.processor(tag, **options)(lambda given: function())
    task = world.schedule(tag, {"n": 1})
    world.change(task, runs=runs)
    world.run(task)
    return world.read(task)


def waits(world: World, task: DelayedTask) -> timedelta:
    assert task.status.name == "NOT_COMPLETE"
    return task.expected_time - world.now()


def retry(**options: Any) -> Callable[[], Any]:
    def ask() -> None:
        raise current_task.retry(**options)

    return ask


SECOND = timedelta(seconds=2)


@pytest.mark.parametrize(
    "options", [{}, {"batch": 5}, {"in_flight": 5}], ids=["single", "batch", "in_flight"]
)
def test_current_task_retry_is_a_retry(world: World, options: Any) -> None:
    task = run(world, retry(countdown=600, exc=ValueError("the bank is closed")), **options)
    assert abs(waits(world, task) - timedelta(seconds=600)) < SECOND
    assert task.runs == 1
    assert "ValueError: the bank is closed" in (task.error or "")


def test_a_retry_without_a_countdown_takes_the_next_delay_of_the_retry_schedule(
    world: World,
) -> None:
    task = run(world, retry(), runs=1, retries="1m 1h")
    assert abs(waits(world, task) - timedelta(hours=1)) < SECOND


def test_a_retry_past_the_retry_schedule_fails(world: World) -> None:
    task = run(world, retry(exc=ValueError("still closed")), runs=2, retries="1m 1h")
    assert task.status.name == "FAILED"
    assert "still closed" in (task.error or "")


def test_a_tag_without_a_retry_schedule_has_celerys_defaults(world: World) -> None:
    task = run(world, retry())
    assert abs(waits(world, task) - CELERYS_WAIT) < SECOND


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "MaxRetriesExceededError"), ({"exc": ValueError("closed")}, "ValueError: closed")],
    ids=["without an error", "with an error"],
)
def test_a_retry_beyond_max_retries_fails(world: World, options: Any, said: str) -> None:
    task = run(world, retry(**options), runs=3)
    assert task.status.name == "FAILED"
    assert said in (task.error or "")
    other = run(world, retry(max_retries=9), runs=3)
    assert other.status.name == "NOT_COMPLETE"


def test_a_retry_with_an_eta_is_due_at_the_eta(world: World) -> None:
    task = run(world, lambda: retry(eta=world.now() + timedelta(minutes=7))())
    assert abs(waits(world, task) - timedelta(minutes=7)) < SECOND
    naive = run(world, lambda: retry(eta=(world.now() - timedelta(hours=1)).replace(tzinfo=None))())
    assert abs(waits(world, naive)) < SECOND, (
        "naive is UTC, as the app has it, and what is over is now"
    )


def test_a_retry_exception_that_is_raised_or_returned_is_a_retry(world: World) -> None:
    def ask() -> None:
        raise CeleryRetry("busy", when=60)

    for function in (ask, lambda: CeleryRetry("busy", when=60)):
        task = run(world, function)
        assert abs(waits(world, task) - timedelta(minutes=1)) < SECOND
        assert "busy" in (task.error or "")


def test_the_retry_of_a_celery_task_that_a_processor_calls_retries_the_row(
    world: World, app: Celery
) -> None:
    @app.task(bind=True)
    def charge(self: Task) -> None:
        raise self.retry(countdown=5, exc=ValueError("closed"))

    task = run(world, lambda: charge(), retries="1m")
    assert task.status.name == "NOT_COMPLETE"
    assert "ValueError: closed" in (task.error or "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"args": (1,)}, "retry(args=…) cannot change task"),
        ({"kwargs": {}, "queue": "other"}, "retry(kwargs, queue=…) cannot change task"),
        ({"throw": False}, "retry(throw=False) has no effect on task"),
    ],
)
def test_the_error_names_options_that_a_retry_does_not_support(
    world: World, options: Any, said: str
) -> None:
    task = run(world, retry(**options))
    assert task.status.name == "FAILED"
    assert said in (task.error or "")


@pytest.mark.parametrize("error", [Ignore(), Reject("no", requeue=True)])
@pytest.mark.parametrize(
    "options", [{}, {"batch": 5}, {"in_flight": 5}], ids=["single", "batch", "in_flight"]
)
def test_other_control_exceptions_of_celery_are_errors_that_name_the_outcomes(
    world: World, error: Exception, options: Any
) -> None:
    def end() -> None:
        raise error

    task = run(world, end, **options)
    assert task.status.name == "FAILED"
    assert f"raised celery.exceptions.{type(error).__name__}" in (task.error or "")
    assert "Snooze(after), Cancel(reason)" in (task.error or "")


@pytest.mark.parametrize("call", ["delay", "apply_async", "s"])
def test_a_tag_cannot_be_sent_as_a_message(world: World, call: str) -> None:
    def send() -> None:
        made = getattr(current_task, call)()
        made.apply_async()

    task = run(world, send)
    assert task.status.name == "FAILED"
    assert f"use schedule_delay('{task.tag}', body, delay)" in (task.error or "")


# -- coroutine tasks ------------------------------------------------------------------------------


def test_rows_that_interleave_have_requests_of_their_own(world: World) -> None:
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

    world.delays.processor("a")(look)
    world.delays.processor("b")(look)
    tasks = [world.schedule(tag) for tag in "aaabbb"]
    world.run(*tasks)
    assert set(world.statuses(tasks)) == {"DONE"}
    assert len(seen) == 36
    for tag, id, name, shown, other in seen:
        assert (name, shown, other) == (tag, id, id)


def test_a_celery_task_that_a_coroutine_calls_is_current_meanwhile(
    world: World, app: Celery
) -> None:
    names: list[str] = []

    @app.task(bind=True, name="charge")
    def charge(self: Task) -> None:
        names.append(current_task.name)

    @world.delays.processor("a")
    async def ask(given: Any) -> None:
        charge()
        names.append(current_task.name)

    world.run(world.schedule("a"))
    assert names == ["charge", "a"]


def test_outside_of_rows_the_event_loop_has_no_worker_task(world: World) -> None:
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
