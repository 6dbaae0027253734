"""Time limits of processors, which leave no state behind after a run, and dead processes."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from coverage import Coverage

from delaytasks.model.clock import monotonic
from delaytasks.registry import ProcessorSpec, Registry
from delaytasks.run.celery_context import limited
from delaytasks.worker.quick_loops import has_exited
from tests.refusals import invalid
from tests.waiting import wait_until


def processor(**limits: Any) -> ProcessorSpec:
    registry = Registry()
    registry.processor("a", **limits)(lambda body: None)
    return next(iter(registry))


@pytest.fixture
def handler() -> Iterator[Callable[..., None]]:
    """Yield a handler that user code has installed for the signal of soft time limits."""

    def ours(*_: Any) -> None:
        raise AssertionError("a limit struck that was over")

    before = signal.signal(signal.SIGALRM, ours)
    yield ours
    signal.signal(signal.SIGALRM, before)


INVALID: list[dict[str, Any]] = [
    *({"soft_time_limit": 0}, {"time_limit": -1}, {"time_limit": "soon"}),
    *({"time_limit": float("nan")}, {"soft_time_limit": 5, "time_limit": 5}),
    {"soft_time_limit": "1m", "time_limit": 5},
]


@pytest.mark.parametrize("limits", INVALID, ids=str)
def test_invalid_time_limits_are_refused(limits: dict[str, Any]) -> None:
    with invalid(next(iter(limits))):
        processor(**limits)


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How hard limits are armed, which end the process with a dump, and "over" for each end."""
    calls: list[Any] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda s, **more: calls.append((s, more["exit"]))
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("over"))
    return calls


def test_limits_end_with_the_call_and_leave_nothing(
    handler: Callable[..., None], dumps: list[Any]
) -> None:
    if Coverage.current():
        pytest.skip("an exception in a trace function leaves coverage's lock held for ever")
    limit_s, ends = 0.002, {True: 0, False: 0}
    spread = processor(soft_time_limit=limit_s, time_limit=60)
    for n in range(1500):
        until = monotonic() + limit_s + (n % 100 - 50) * 4e-6

        def call(until: float = until) -> None:
            while monotonic() < until:
                pass

        try:
            limited(spread, call)
            ends[True] += 1
        except SoftTimeLimitExceeded:
            ends[False] += 1
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.getsignal(signal.SIGALRM) is handler
        # The hard one is disarmed, whenever the soft one strikes.
        assert dumps[-2:] == [(60, True), "over"]
    assert min(ends.values()) > 50, "else nothing was tried"


def test_a_dead_child_is_detected_before_and_after_it_is_waited_for() -> None:
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reads, 1)
        os._exit(1)
    assert not has_exited(pid)
    os.write(writes, b"!")
    wait_until(lambda: has_exited(pid), 10, "the child to be dead")
    assert has_exited(pid)
    assert os.waitpid(pid, 0)[0] == pid, "its parent's pool still hears of it"
    assert has_exited(pid), "and who heard of it in the pool's place does not hide it"
    assert not has_exited(os.getpid())
    os.close(reads)
    os.close(writes)
