"""Celery's signals and events report the same outcome as the row itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from traceback import extract_tb
from typing import Any

import pytest
from celery import Celery, signals
from sqlalchemy.orm import Session

from delaytasks import Cancel, DelayTask, Done, Fail, Retry, Snooze
from delaytasks.core.interfaces import Settlement
from delaytasks.worker.celery_context import CeleryTaskContext
from tests.recording import RunnerHarness
from tests.unit.conftest import Make

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

    def name(self, task: DelayTask) -> str:
        [(name, _)] = self.ends[str(task.id)]
        return name

    def fields(self, task: DelayTask) -> dict[str, Any]:
        return self.ends[str(task.id)][0][1]


@pytest.fixture
def sent() -> Iterator[Signals]:
    made = Signals()
    yield made
    made.close()


@pytest.fixture
def bench(make: Make) -> RunnerHarness:
    made = make()
    app = Celery(set_as_current=False)
    made.execute = CeleryTaskContext(app, "w@host", made.clock)  # type: ignore[method-assign]
    made.runner = made.make_runner()
    return made


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
    bench: RunnerHarness, sent: Signals, outcome: str
) -> None:
    """Elastic APM calls `sys.exc_info()` in its receiver, and names the function of the task."""
    seen = []

    def look(sender: Any, exception: BaseException, traceback: Any, **_: Any) -> None:
        names = [frame.name for frame in extract_tb(exception.__traceback__)]
        seen.append((sys.exc_info()[1] is exception, traceback, names[-1], sender.__name__))

    sent._connect(signals.task_failure, look)

    def close_order(body: Any) -> Any:
        return OUTCOMES[outcome][0]()

    bench.registry.processor("one")(close_order)
    bench.run(bench.schedule("one", 7))
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
    bench: RunnerHarness, sent: Signals, outcome: str, mode: str
) -> None:
    ends, is_last, signal, status = OUTCOMES[outcome]
    options: dict[str, Any] = {"batch": {"batch": 10}, "in_flight": {"in_flight": 5}}.get(mode, {})
    bench.registry.processor("one", retries="1h", **options)(lambda given: ends())
    watching = Watching()
    bench.runner = bench.make_runner(watcher=lambda: watching)
    tasks = [bench.schedule("one", number) for number in range(3)]
    for task in tasks:
        if is_last:
            bench.change(task, attempts=1)
    bench.run(*tasks)
    assert bench.statuses(tasks) == [status] * 3
    assert [sent.name(task) for task in tasks] == [signal] * 3
    assert len(watching.moves) == 3
    called = tasks[:1] if mode == "batch" else tasks
    assert sorted(sent.began) == sorted(str(task.id) for task in called)
    assert sent.states == {str(task.id): STATES[signal] for task in called}


def test_each_task_of_a_batch_has_its_own_signal(bench: RunnerHarness, sent: Signals) -> None:
    def work(tasks: list[DelayTask]) -> dict[int, Any]:
        return {task.id: outcome for task, outcome in zip(tasks, ends, strict=True)}

    ends = [None, Fail("broken"), Retry("5m"), Cancel("not needed"), Done(7)]
    bench.registry.processor("batch", batch=10)(work)
    tasks = [bench.schedule("batch", number) for number in range(len(ends))]
    bench.run(*tasks)
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
    bench: RunnerHarness, sent: Signals, options: Any
) -> None:
    bench.registry.processor("one", **options)(lambda given: None)
    good, bad = bench.schedule("one", 1), bench.schedule("one", 2)
    bench.change(bad, message_body="{nope")
    bench.run(good, bad)
    assert bench.statuses([good, bad]) == ["DONE", "FAILED"]
    assert (sent.name(good), sent.name(bad)) == ("success", "failure")
    assert sent.states[str(bad.id)] == "FAILURE"


def test_signals_have_the_arguments_that_receivers_use(bench: RunnerHarness, sent: Signals) -> None:
    bench.registry.processor("fail")(lambda body: Fail("the card was refused"))
    bench.registry.processor("retry")(lambda body: Retry("5m", "busy"))
    bench.registry.processor("raise")(raise_error)
    fail, retry, raises = (
        bench.schedule("fail", 7),
        bench.schedule("retry"),
        bench.schedule("raise"),
    )
    bench.run(fail, retry, raises)
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


def test_a_completed_task_has_succeeded_even_if_its_processor_raises_later(
    bench: RunnerHarness, sent: Signals
) -> None:
    def complete(body: Any, task: DelayTask) -> None:
        with Session(bench.store.database.tx) as session, session.begin():
            task.complete(session)
        raise ValueError("too late")

    bench.registry.processor("complete")(complete)
    task = bench.schedule("complete")
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]
    assert sent.name(task) == "success"
