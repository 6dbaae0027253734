"""The parts that run the asynchronous twins: threads, turns of the event loop, iterators."""

from __future__ import annotations

import asyncio
import os

from delaytasks.core.loop import ThreadPool
from delaytasks.twins import STARTS_PER_TURN, LoopTurns


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
