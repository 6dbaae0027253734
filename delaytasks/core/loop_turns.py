"""Spreads the starts of many calls over the turns of an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

#: The calls that start in one turn. Each takes up to half a millisecond of the loop's thread.
STARTS_PER_TURN = 8


class LoopTurns:
    """Lets a few calls start in each turn of a loop.

    An event loop runs all callbacks that are ready before it looks for input. A burst of some
    hundred calls would delay all other callbacks by the sum of their starts.
    """

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopTurns] = WeakKeyDictionary()

    async def wait(self) -> None:
        """Wait until the calling coroutine may start. Calls start in the order in which they were
        made."""
        loop = asyncio.get_running_loop()
        turns = self._loops.get(loop)
        if turns is None:
            turns = self._loops[loop] = _LoopTurns()
        await turns.wait(loop)


class _LoopTurns:
    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = STARTS_PER_TURN
        self._is_counting = False

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_turn, loop)
        if self._left:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next calls start. Without any, the next call starts immediately."""
        self._left = STARTS_PER_TURN
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # a cancelled call has no turn
                place.set_result(None)
                self._left -= 1
        self._is_counting = self._left < STARTS_PER_TURN
        if self._is_counting:
            loop.call_soon(self._next_turn, loop)
