"""What Celery shows of a row while its processor runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from threading import Thread
from typing import Any

import pytest
from celery import Celery, current_task, signals
from celery._state import _task_stack

from delaytasks.core.clock import ManualClock
from delaytasks.core.ports import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.engine.registry import Processor, Registry
from delaytasks.engine.running import Ended
from delaytasks.worker.surroundings import Surroundings

DUE = datetime(2026, 11, 21, tzinfo=timezone.utc)
Seen = list[tuple[str, str, int]]


def task_of(number: int, tag: str = "a", attempts: int = 1) -> DelayTask:
    return DelayTask(number, tag, '{"n": 1}', DUE, queue="mail", priority=3, attempts=attempts)


def look(seen: Seen) -> Callable[[Any], None]:
    def note(body: Any) -> None:
        request = current_task.request
        seen.append((current_task.name, request.id, request.retries))

    return note


def end(value: object, error: BaseException | None) -> Sequence[Ended]:
    """Every row that does not raise has succeeded."""
    if error is not None:
        raise error
    return [Ended(Settlement(task_of(0), "succeed"), value)]


@pytest.fixture
def surroundings() -> Iterator[Surroundings]:
    yield Surroundings(Celery(set_as_current=False), "w@host", ManualClock(DUE))
    assert not _task_stack.stack, "nothing is left behind"


def processor(tag: str, function: Callable[[Any], object]) -> Processor:
    registry = Registry()
    registry.processor(tag)(function)
    found = registry.get(tag)
    assert found is not None
    return found


@pytest.mark.parametrize("is_kept", [False, True])
def test_each_row_has_a_request_of_its_own(surroundings: Surroundings, is_kept: bool) -> None:
    seen: Seen = []
    a, b = processor("a", look(seen)), processor("b", look(seen))
    rows = [(a, task_of(1)), (a, task_of(2, attempts=4)), (b, task_of(3, "b")), (a, task_of(4))]

    def run_all() -> None:
        for work, task in rows:
            surroundings(work, task, end)

    if is_kept:
        with surroundings.kept():
            run_all()
    else:
        run_all()
    assert seen == [("a", "1", 0), ("a", "2", 3), ("b", "3", 0), ("a", "4", 0)]
    assert not _task_stack.stack


def test_a_request_tells_what_celerys_does(surroundings: Surroundings) -> None:
    requests: list[Any] = []
    work = processor("a", lambda body: requests.append(current_task.request))
    with surroundings.kept():
        surroundings(work, task_of(1, attempts=2), end)
        surroundings(work, task_of(2), end)
    first, second = requests
    assert first is not second
    assert (first.id, first.root_id, first.hostname, first.args, first.kwargs) == ("1", "1", "w@host", ({"n": 1},), {})
    assert first.delivery_info == {"routing_key": "mail", "priority": 3, "redelivered": True}
    assert second.delivery_info["redelivered"] is False
    assert first.eta == DUE.isoformat()
    assert first.delay_task.id == 1
    assert first.task == "a"
    assert not first.is_eager
    assert not first.called_directly
    assert first.as_execution_options()["headers"] == {}


def test_rows_that_raise_leave_nothing_behind(surroundings: Surroundings) -> None:
    def fail(body: Any) -> None:
        raise SystemExit

    with pytest.raises(SystemExit), surroundings.kept():
        surroundings(processor("a", fail), task_of(1), end)


def test_what_one_thread_keeps_is_not_seen_by_another(surroundings: Surroundings) -> None:
    seen: Seen = []
    work = processor("a", look(seen))
    with surroundings.kept():
        surroundings(work, task_of(1), end)
        other = Thread(target=surroundings, args=(work, task_of(2), end))
        other.start()
        other.join()
        surroundings(work, task_of(3), end)
    assert [id for _, id, _ in seen] == ["1", "2", "3"]


def test_rows_run_within_a_row_have_their_own(surroundings: Surroundings) -> None:
    seen: Seen = []
    inner = processor("b", look(seen))

    def outer(body: Any) -> None:
        with surroundings.kept():
            surroundings(inner, task_of(2, "b"), end)
        look(seen)(body)

    with surroundings.kept():
        surroundings(processor("a", outer), task_of(1), end)
        surroundings(inner, task_of(3, "b"), end)
    assert [id for _, id, _ in seen] == ["2", "1", "3"]


def test_signals_are_sent_for_each_row(surroundings: Surroundings) -> None:
    told: list[tuple[str, str | None]] = []

    def before(task_id: str, **_: Any) -> None:
        told.append((task_id, None))

    def after(task_id: str, state: str, **_: Any) -> None:
        told.append((task_id, state))

    signals.task_prerun.connect(before, weak=False)
    signals.task_postrun.connect(after, weak=False)
    try:
        with surroundings.kept():
            for number in (1, 2):
                surroundings(processor("a", lambda body: None), task_of(number), end)
    finally:
        signals.task_prerun.disconnect(before)
        signals.task_postrun.disconnect(after)
    assert told == [("1", None), ("1", "SUCCESS"), ("2", None), ("2", "SUCCESS")]
