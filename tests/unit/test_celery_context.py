"""Celery exposes the row whose processor runs, and its signals and retries work."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Barrier
from traceback import extract_tb
from typing import Any

import pytest
from celery import current_task, signals
from celery._state import get_current_task
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry

from delaytasks import Cancel, DelayedTask, Done, Fail, Retry, Snooze
from tests.world import Monitor, World

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
        if body == "outer":
            world.run(inner, by="worker-2")
        if body != "inner":
            both.wait()
        world.notes.append((body, int(current_task.request.id)))
        if body != "inner":
            both.wait()

    world.delays.processor("inner")(look)
    world.delays.processor("outer")(look)
    world.delays.processor("in flight", in_flight=2)(look)
    inner, *others = (world.schedule(tag, tag) for tag in ("inner", "outer", "in flight"))
    world.run(*others)
    assert sorted(world.notes) == sorted((task.tag, task.id) for task in (inner, *others))


# -- celery's signals and events report the same outcome as the row itself ------------------------


STATES = {"success": "SUCCESS", "failure": "FAILURE", "retry": "RETRY", "revoked": "REVOKED"}


class Signals(list[tuple[str, int, dict[str, Any]]]):
    """The name, the id of the row, and the arguments of each signal that Celery sends."""

    def note(self, name: str, sender: Any, **fields: Any) -> None:
        request = fields.get("request", sender.request)
        assert fields.get("task_id", request.id) == request.id
        self.append((name, int(request.id), fields))

    def of(self, task: DelayedTask) -> tuple[str, dict[str, Any]]:
        """Return the only signal about the end of a task."""
        [(name, _, fields)] = [one for one in self if one[0] in STATES and one[1] == task.id]
        return name, fields

    def names(self, *tasks: DelayedTask) -> list[str]:
        return [self.of(task)[0] for task in tasks]

    def states(self) -> dict[int, str]:
        """Return the states after the calls of processors."""
        return {id: fields["state"] for name, id, fields in self if name == "postrun"}


@pytest.fixture
def sent() -> Iterator[Signals]:
    with ExitStack() as stack:
        made = Signals()
        for name in ("prerun", "postrun", *STATES):
            stack.enter_context(connected(name, partial(made.note, name)))
        yield made


@contextmanager
def connected(name: str, receiver: Callable[..., None]) -> Iterator[None]:
    """Send Celery's signals of this name to a receiver."""
    signal = getattr(signals, f"task_{name}")
    signal.connect(receiver, weak=False)
    yield
    signal.disconnect(receiver)


def raise_error() -> None:
    raise ValueError("no")


#: Each entry has the function of a processor with the retry schedule "1h", whether its schedule is
#: used up, the expected signal and the expected status.
OUTCOMES = {
    "returns None": (lambda: None, False, "success", "DONE"),
    "Done": (lambda: Done({"n": 1}), False, "success", "DONE"),
    "Fail": (lambda: Fail("the card was refused"), False, "failure", "FAILED"),
    "Retry": (lambda: Retry(reason="busy"), False, "retry", "NOT_COMPLETE"),
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

    world.delays.processor("one")(close_order)
    with connected("failure", look):
        world.run(task := world.schedule("one", 7))
    [(is_handled, traceback, innermost, name)] = seen
    assert (is_handled, name) == (True, "close_order")
    assert traceback is not None
    assert (innermost == "raise_error") == (outcome != "Fail")
    assert "_send_failure" not in {frame.name for frame in extract_tb(traceback)}
    assert sys.exc_info() == (None, None, None)
    failure, said = sent.of(task)[1], "the card was refused" if outcome == "Fail" else "no"
    assert (str(failure["exception"]), failure["args"]) == (said, (7,))
    assert said in failure["einfo"].traceback


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_signals_have_the_outcome(world: World, sent: Signals, outcome: str, mode: str) -> None:
    ends, is_last, signal, status = OUTCOMES[outcome]
    world.delays.processor("one", retries="1h", **MODES[mode])(lambda given: ends())
    heard = Monitor(world)
    tasks = [world.schedule("one", number) for number in range(3)]
    for task in tasks:
        world.change(task, runs=int(is_last))
    world.run(*tasks)
    assert world.statuses(tasks) == [status] * 3
    assert sent.names(*tasks) == [signal] * 3
    shown = {heard.task(task, attempt=1 + is_last).state for task in tasks}
    assert shown == {STATES[signal]}, "what Flower shows"
    called = tasks[:1] if mode == "batch" else tasks
    began = [id for name, id, _ in sent if name == "prerun"]
    assert sorted(began) == sorted(task.id for task in called)
    assert sent.states() == {task.id: STATES[signal] for task in called}
    assert outcome != "Retry" or "busy" in str(sent.of(tasks[0])[1]["reason"])


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


# -- celery's own ends -----------------------------------------------------------------------------


def fail_with(error: Exception) -> None:
    raise error


def send_by(call: str) -> None:
    getattr(current_task, call)().apply_async()


#: What a processor does that was a task of Celery, and what its error says.
OTHER_ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "ignore": (partial(fail_with, Ignore()), "Snooze(after), Cancel(reason)"),
    "reject": (partial(fail_with, Reject("no", requeue=True)), "celery.exceptions.Reject"),
    "raise retry": (partial(fail_with, CeleryRetry("busy")), "celery.exceptions.Retry"),
    "retry": (lambda: current_task.retry(countdown=600), "return Retry(after=…)"),
    "delay": (partial(send_by, "delay"), "use schedule_delay('celery', body, delay)"),
    "apply_async": (partial(send_by, "apply_async"), "use schedule_delay('celery', body, delay)"),
    "s": (partial(send_by, "s"), "use schedule_delay('celery', body, delay)"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OTHER_ENDS)
def test_ends_and_calls_of_celery_name_the_outcomes(world: World, name: str, mode: str) -> None:
    end, said = OTHER_ENDS[name]
    world.delays.processor("celery", **MODES[mode])(lambda given: end())
    world.run(task := world.schedule("celery", {"n": 1}))
    assert world.statuses([task]) == ["FAILED"]
    assert said in (world.read(task).error or "")
