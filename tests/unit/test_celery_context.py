"""Celery exposes the row whose processor is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, current_task, signals
from celery._state import _task_stack

from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.core.workers import NO_RENEWAL
from delaytasks.execution.executor import Lease, ProcessorCall, RunResult, TaskRun
from delaytasks.processors.registry import ProcessorSpec, Registry
from delaytasks.worker.celery_context import CeleryTaskContext, row_in_context
from tests.recording import ManualClock

DUE = datetime(2026, 11, 21, tzinfo=timezone.utc)
Seen = list[tuple[str, str, int]]


def task_of(number: int, tag: str = "a", attempts: int = 1) -> DelayTask:
    return DelayTask(number, tag, '{"n": 1}', DUE, queue="mail", priority=3, attempts=attempts)


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


def call(processor: ProcessorSpec, task: DelayTask) -> ProcessorCall:
    run = TaskRun(task, Mock(), lambda session, task: None, NO_LEASE)
    return ProcessorCall(processor, [run])


@pytest.mark.parametrize("is_kept", [False, True])
def test_each_row_has_its_own_request(task_context: CeleryTaskContext, is_kept: bool) -> None:
    seen: Seen = []
    a, b = processor("a", look(seen)), processor("b", look(seen))
    rows = [(a, task_of(1)), (a, task_of(2, attempts=4)), (b, task_of(3, "b")), (a, task_of(4))]

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
        task_context(call(work, task_of(1, attempts=2)), end)
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


def test_signals_are_sent_for_each_row(task_context: CeleryTaskContext) -> None:
    told: list[tuple[str, str | None]] = []

    def before(task_id: str, **_: Any) -> None:
        told.append((task_id, None))

    def after(task_id: str, state: str, **_: Any) -> None:
        told.append((task_id, state))

    signals.task_prerun.connect(before, weak=False)
    signals.task_postrun.connect(after, weak=False)
    try:
        with task_context.reuse_stack():
            for number in (1, 2):
                task_context(call(processor("a", lambda body: None), task_of(number)), end)
    finally:
        signals.task_prerun.disconnect(before)
        signals.task_postrun.disconnect(after)
    assert told == [("1", None), ("1", "SUCCESS"), ("2", None), ("2", "SUCCESS")]
