"""Pool processes that die, fail or lose a chunk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError

from delaytasks.execution.runner import Report
from delaytasks.worker.pool import POOL_REST_S
from tests.unit.dispatcher.dispatcher_harness import DispatcherHarness, Hands
from tests.waiting import wait_until


def test_a_pool_that_refuses_a_chunk_pauses_and_keeps_the_other_entries(
    bench: DispatcherHarness, hands: Hands
) -> None:
    bench.pool.is_broken = True
    bench.dispatcher.take(bench.entries(30))
    assert (bench.dispatcher.waiting, bench.events.counts["chunk.failed"]) == (20, 1)
    bench.pool.is_broken = False
    hands.at += POOL_REST_S
    bench.dispatcher.pump()
    assert bench.sizes() == [10, 10]


def test_a_dead_process_does_not_pause_chunks(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(30))
    _, _, lost = bench.pool.requests.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: bench.pool.requests, 5, "the next chunk")
    assert bench.events.counts["chunk.failed"] == 1


class Sent:
    """A request that is registered in billiard's pool and that no process has started yet."""

    def __init__(self, books: dict[int, Any], written_to: Any) -> None:
        self._cache, self._job, self._books = books, len(books), books
        self._write_to = written_to
        books[self._job] = self

    def ready(self) -> bool:
        return False


def process_of(pid: int, is_alive: bool = True) -> Any:
    return SimpleNamespace(pid=pid, inqW_fd=pid + 100, _is_alive=lambda: is_alive)


#: The process to which the pool wrote a chunk, and whether the chunk reached that process.
WRITTEN = [
    pytest.param(process_of(1), True, id="to one that was there"),
    pytest.param(process_of(1, is_alive=False), False, id="to one that died"),
    pytest.param(process_of(2), False, id="to one that died, whose successor has its pipe"),
    pytest.param(None, False, id="to nobody yet"),
]


@pytest.mark.parametrize(("written_to", "is_written"), WRITTEN)
def test_a_chunk_that_the_pool_forgets_is_remembered_or_blocks_no_process(
    bench: DispatcherHarness, written_to: Any, is_written: bool
) -> None:
    books: dict[int, Any] = {}
    keep = bench.pool.apply_async
    busy: set[int] = set()
    bench.pool._pool = SimpleNamespace(_pool=[process_of(1)], _busy_workers=busy)  # type: ignore[attr-defined]

    def apply_async(*args: Any, **options: Any) -> Sent:
        keep(*args, **options)
        return Sent(books, written_to)

    bench.pool.apply_async = apply_async  # type: ignore[method-assign]
    bench.dispatcher.take(bench.entries(20))
    assert bench.dispatcher.recall() == []
    assert len(bench.dispatcher.in_flight) == 2, "nothing is forgotten yet"
    first = books.pop(0)
    [request, *_] = bench.pool.requests[0]
    assert bench.dispatcher.recall() == ([] if is_written else list(request.entries))
    assert books.get(0) is (first if is_written else None)
    assert busy == ({101} if is_written else set()), "Celery before 5.7 forgets this, too"
    assert len(bench.dispatcher.in_flight) == (2 if is_written else 1)
    bench.dispatcher.take(bench.entries(5, start=100))
    assert len(bench.pool.requests) == (2 if is_written else 3)
    # The report arrives after all, or the process was busy with another request for a long time.
    bench.pool.end(Report(10, 10, 0.05))
    assert bench.events.counts["chunk.failed"] == 0
