"""The parts that run the asynchronous twins: threads, turns of the event loop, iterators."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Generator

import pytest

from delaytasks.core.events import Events
from delaytasks.core.loop import ThreadPool
from delaytasks.twins import STARTS_PER_TURN, AsyncCalls, LoopTurns


def test_a_forked_child_has_its_own_threads() -> None:
    pool = ThreadPool(1, "test")
    assert pool.submit(os.getpid).result(10) == os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if pool.submit(os.getpid).result(10) == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


def test_a_pool_that_was_closed_starts_threads_again() -> None:
    pool = ThreadPool(1, "test")
    for _ in range(2):
        assert pool.submit(os.getpid).result(10) == os.getpid()
        pool.close()


def test_calls_start_in_their_order_and_a_few_in_each_turn_of_the_event_loop() -> None:
    started: list[int] = []
    turns: list[int] = []

    async def start(turn: LoopTurns, number: int) -> None:
        await turn.wait()
        started.append(number)

    async def go() -> None:
        turn = LoopTurns()
        calls = [asyncio.create_task(start(turn, number)) for number in range(100)]
        calls[50].cancel()
        while len(started) < 99:
            before = len(started)
            await asyncio.sleep(0)
            turns.append(len(started) - before)
        await start(turn, 100)

    asyncio.run(go())
    assert started == [*range(50), *range(51, 101)]
    assert max(turns) <= STARTS_PER_TURN


@pytest.mark.parametrize("threads", [1, 4])
def test_an_iterator_is_closed_when_its_reader_is_cancelled(threads: int) -> None:
    """The reader is cancelled while a thread makes the next item."""
    is_making, goes_on, is_closed = threading.Event(), threading.Event(), threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield 1
            is_making.set()
            assert goes_on.wait(10)
            yield 2
        finally:
            is_closed.set()

    iterator = items()  # kept, so that the garbage collector does not close it
    failed: list[object] = []
    events = Events()
    events.subscribe(lambda name, fields: failed.append(fields))
    pool = ThreadPool(threads, "test")
    calls = AsyncCalls(pool, [], events, lambda call: None, lambda: None)

    async def read() -> None:
        async for _ in calls.iterate(lambda: iterator):
            pass

    async def go() -> None:
        reader = asyncio.create_task(read())
        while not is_making.is_set():
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert not is_closed.is_set(), "the reader does not wait for the item"
        goes_on.set()

    asyncio.run(go())
    assert is_closed.wait(10)
    pool.close()
    assert failed == []
