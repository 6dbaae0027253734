"""Celery exposes the row whose processor runs, and its signals and retries work."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from functools import partial
from threading import Barrier
from traceback import extract_tb
from typing import Any
from unittest.mock import Mock

import pytest
from celery import current_task, signals
from celery._state import get_current_task
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry

from delaytasks import Cancel, DelayedTask, Done, Fail, Retry, Snooze
from tests.world import World

#: The options of a processor in each way of calling it.
MODES: dict[str, Any] = {"single": {}, "batch": {"batch": 10}, "thread": {"in_flight": 5}}


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    before = contextvars.copy_context()
    yield
    assert get_current_task() is None
    assert contextvars.copy_context() == before


# -- celery exposes the row whose processor is running --------------------------------------------


def test_a_request_has_the_attributes_of_a_request_of_celery(world: World) -> None:
    world.worker(hostname="w@host")
    world.delays.processor("a")(lambda body: world.notes.append(current_task.request))
    options: dict[str, Any] = {"queue": "mail", "priority": 3}
    task, other = (world.schedule("a", {"n": 1}, **options, meta={"trace": "00-1"}) for _ in "12")
    world.change(task, runs=1)
    world.run(task, other)
    first, second = sorted(world.notes, key=lambda request: int(request.id))
    assert first is not second
    assert (first.id, first.root_id, first.task) == (str(task.id), str(task.id), "a")
    assert (first.retries, second.retries) == (1, 0)
    assert (first.hostname, first.args, first.kwargs) == ("w@host", ({"n": 1},), {})
    assert first.delivery_info == {"routing_key": "mail", "priority": 3, "redelivered": True}
    assert second.delivery_info["redelivered"] is False
    assert (first.eta, first.delay_task.id) == (task.expected_time.isoformat(), task.id)
    assert (first.is_eager, first.called_directly) == (False, False)
    assert first.headers == {"trace": "00-1"}, "Datadog finds the trace of the caller there"
    assert first.as_execution_options()["headers"] == {"trace": "00-1"}


def test_rows_of_two_threads_and_rows_within_a_row_have_their_own_requests(world: World) -> None:
    both = Barrier(2, timeout=10)

    def look(body: Any) -> None:
        both.wait()
        world.notes.append((body, int(current_task.request.id)))
        both.wait()

    def outer(body: Any) -> None:
        world.run(inner, by="worker-2")
        look(body)

    world.delays.processor("in flight", in_flight=2)(look)
    world.delays.processor("outer")(outer)
    note = world.notes.append
    world.delays.processor("inner")(lambda body: note((body, int(current_task.request.id))))
    inner, *others = (world.schedule(tag, tag) for tag in ("inner", "outer", "in flight"))
    world.run(*others)
    assert sorted(world.notes) == sorted((task.tag, task.id) for task in (inner, *others))


# -- celery's signals and events report the same outcome as the row itself ------------------------


STATES = {"success": "SUCCESS", "failure": "FAILURE", "retry": "RETRY", "revoked": "REVOKED"}


class Signals:
    """Record the name, the id of the row, and the arguments of each signal that Celery sends."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, Any]]] = []
        self._made: list[tuple[Any, Any]] = []
        for name in ("prerun", "postrun", *STATES):
            self.connect(getattr(signals, f"task_{name}"), partial(self._note, name))

    def connect(self, signal: Any, receiver: Any) -> None:
        signal.connect(receiver, weak=False)
        self._made.append((signal, receiver))

    def _note(self, name: str, sender: Any, **fields: Any) -> None:
        request = fields.get("request", sender.request)
        assert fields.get("task_id", request.id) == request.id
        self.seen.append((name, int(request.id), fields))

    def close(self) -> None:
        for signal, receiver in self._made:
            signal.disconnect(receiver)

    def of(self, task: DelayedTask) -> tuple[str, dict[str, Any]]:
        """Return the only signal about the end of a task."""
        found = [one for one in self.seen if one[0] in STATES and one[1] == task.id]
        [(name, _, fields)] = found
        return name, fields

    def names(self, *tasks: DelayedTask) -> list[str]:
        return [self.of(task)[0] for task in tasks]

    def states(self) -> dict[int, str]:
        """Return the states after the calls of processors."""
        return {id: fields["state"] for name, id, fields in self.seen if name == "postrun"}


@pytest.fixture
def sent() -> Iterator[Signals]:
    made = Signals()
    yield made
    made.close()


def raise_error() -> None:
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
    "raises": (raise_error, False, "retry", "NOT_COMPLETE"),
    "raises, the last time": (raise_error, True, "failure", "FAILED"),
    "exits": (lambda: sys.exit(3), True, "failure", "FAILED"),
}


@pytest.mark.parametrize("outcome", ["Fail", "raises, the last time"])
def test_a_failure_is_sent_while_it_is_handled(world: World, sent: Signals, outcome: str) -> None:
    """Elastic APM calls `sys.exc_info()` in its receiver, and names the function of the task."""
    seen = []

    def look(sender: Any, exception: BaseException, traceback: Any, **_: Any) -> None:
        names = [frame.name for frame in extract_tb(exception.__traceback__)]
        seen.append((sys.exc_info()[1] is exception, traceback, names[-1], sender.__name__))

    def close_order(body: Any) -> Any:
        return OUTCOMES[outcome][0]()

    sent.connect(signals.task_failure, look)
    world.delays.processor("one")(close_order)
    world.run(world.schedule("one", 7))
    [(is_handled, traceback, innermost, name)] = seen
    assert is_handled
    assert traceback is not None
    assert (innermost == "raise_error") == (outcome != "Fail")
    assert "_send_failure" not in {frame.name for frame in extract_tb(traceback)}
    assert name == "close_order"
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_signals_have_the_outcome(world: World, sent: Signals, outcome: str, mode: str) -> None:
    ends, is_last, signal, status = OUTCOMES[outcome]
    world.delays.processor("one", retries="1h", **MODES[mode])(lambda given: ends())
    watcher = Mock()
    world.worker(watcher=watcher)
    tasks = [world.schedule("one", number) for number in range(3)]
    for task in tasks:
        world.change(task, runs=int(is_last))
    world.run(*tasks)
    assert world.statuses(tasks) == [status] * 3
    assert sent.names(*tasks) == [signal] * 3
    assert {call.args[0].task.id for call in watcher.ended.mock_calls} == {t.id for t in tasks}
    called = tasks[:1] if mode == "batch" else tasks
    began = [id for name, id, _ in sent.seen if name == "prerun"]
    assert sorted(began) == sorted(task.id for task in called)
    assert sent.states() == {task.id: STATES[signal] for task in called}


def test_each_task_of_a_batch_has_its_own_signal(world: World, sent: Signals) -> None:
    ends = [None, Fail("broken"), Retry("5m"), Cancel("not needed"), Done(7)]
    world.delays.processor("batch", batch=10)(lambda tasks: ends)
    world.run(*(tasks := [world.schedule("batch", number) for number in range(len(ends))]))
    assert sent.names(*tasks) == ["success", "failure", "retry", "revoked", "success"]
    assert str(sent.of(tasks[1])[1]["exception"]) == "broken"
    assert sent.of(tasks[4])[1]["result"] == 7
    # There is one call, which has the request of the first task.
    assert sent.states() == {tasks[0].id: "SUCCESS"}


@pytest.mark.parametrize("mode", MODES)
def test_an_unreadable_body_is_sent_as_a_failure(world: World, sent: Signals, mode: str) -> None:
    world.delays.processor("one", **MODES[mode])(lambda given: None)
    good, bad = world.schedule("one", 1), world.schedule("one", 2)
    world.change(bad, message_body="{nope")
    world.run(good, bad)
    assert world.statuses([good, bad]) == ["DONE", "FAILED"]
    assert sent.names(good, bad) == ["success", "failure"]
    assert sent.states()[bad.id] == "FAILURE"


def test_signals_have_the_arguments_that_receivers_use(world: World, sent: Signals) -> None:
    world.delays.processor("fail")(lambda body: Fail("the card was refused"))
    world.delays.processor("retry")(lambda body: Retry("5m", "busy"))
    world.delays.processor("raise")(lambda body: raise_error())
    fail, retry, raises = (world.schedule(tag, 7) for tag in ("fail", "retry", "raise"))
    world.run(fail, retry, raises)
    failure, retried, raised = (sent.of(task)[1] for task in (fail, retry, raises))
    assert str(failure["exception"]) == "the card was refused"
    assert failure["args"] == (7,)
    assert failure["traceback"] is not None
    assert "the card was refused" in failure["einfo"].traceback
    assert "busy" in str(retried["reason"])
    assert retried["request"].id == str(retry.id)
    assert isinstance(raised["exception"], ValueError)
    assert "raise_error" in raised["einfo"].traceback


# -- celery's own ends -----------------------------------------------------------------------------


def run(world: World, function: Callable[[], Any], runs: int = 0, **options: Any) -> DelayedTask:
    """Run a task that has already run `runs` times, and return the stored task."""
    world.delays.processor("celery", **options)(lambda given: function())
    task = world.schedule("celery", {"n": 1})
    world.change(task, runs=runs)
    world.run(task)
    return world.read(task)


@pytest.mark.parametrize("error", [Ignore(), Reject("no", requeue=True), CeleryRetry("busy")])
@pytest.mark.parametrize("mode", MODES)
def test_other_errors_of_celery_name_the_outcomes(world: World, error: Any, mode: str) -> None:
    def end() -> None:
        raise error

    task = run(world, end, **MODES[mode])
    assert task.status.name == "FAILED"
    assert f"raised celery.exceptions.{type(error).__name__}" in (task.error or "")
    assert "Snooze(after), Cancel(reason)" in (task.error or "")


@pytest.mark.parametrize("call", ["delay", "apply_async", "s"])
def test_a_tag_cannot_be_sent_as_a_message(world: World, call: str) -> None:
    task = run(world, lambda: getattr(current_task, call)().apply_async())
    assert task.status.name == "FAILED"
    assert "use schedule_delay('celery', body, delay)" in (task.error or "")


def test_a_retry_of_celery_names_the_outcomes(world: World) -> None:
    task = run(world, lambda: current_task.retry(countdown=600))
    assert task.status.name == "FAILED"
    assert "return Retry(after=…)" in (task.error or "")
