"""Runs the synchronous methods of `DelayTasks` for coroutines, without blocking the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.loop_turns import LoopTurns
from delaytasks.core.thread_pool import ThreadPool

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
#: Runs a call as a web framework requires whose connections belong to threads or requests. None
#: means that the call may run in any thread.
InFramework = Callable[[Callable[[], Any]], Awaitable[Any] | None]
_END = object()


class AsyncCalls:
    """A call runs on the caller's `AsyncSession` or `AsyncConnection`, else in a thread.

    Parameters
    ----------
    threads
        The pool of threads. It has as many threads as an engine keeps connections, so that
        concurrent calls do not wait for a connection.
    clocks
        The clocks of all shards, which must not be read from a database on the event loop.
    in_framework
        Runs a call as a web framework requires, instead of `threads`.
    current_session
        Returns the session of `DelayTasks.using`, or None.
    """

    def __init__(
        self,
        threads: ThreadPool,
        clocks: Sequence[Clock],
        events: Events,
        in_framework: InFramework,
        current_session: Callable[[], Any],
    ) -> None:
        self._threads = threads
        self._clocks = clocks
        self._events = events
        self._in_framework = in_framework
        self._current_session = current_session
        self._turns = LoopTurns()

    async def run(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Return the result of a synchronous method."""
        await self._turns.wait()
        has_session = "session" in options
        session = options.pop("session", None)
        if has_session and session is None:
            session = self._current_session()
        call = partial(method, *arguments, **options)
        if session is None:
            return await self._in_thread(call)
        from delaytasks.storage.async_sessions import run_in_session

        if any(clock.is_due for clock in self._clocks):
            await self._in_thread(self._measure)
        return await run_in_session(session, lambda session: call(session=session))

    async def iterate(
        self, method: Callable[..., Generator[T, None, None]], *arguments: Any, **options: Any
    ) -> AsyncIterator[T]:
        """Yield the items of a synchronous iterator. Each item is made in a thread."""
        from asyncio import CancelledError

        iterator = await self.run(method, *arguments, **options)
        is_free = Lock()

        def alone(step: Callable[[], Any]) -> Any:
            with is_free:
                return step()

        close = partial(alone, iterator.close)
        try:
            while (
                item := await self._in_thread(partial(alone, partial(next, iterator, _END)))
            ) is not _END:
                yield item
        except GeneratorExit:
            await self._in_thread(close)
            raise
        except CancelledError:
            # A thread still makes the next item. A generator cannot be closed while it runs.
            await self._later(close)
            raise

    def close(self) -> None:
        self._threads.close()

    async def _later(self, call: Callable[[], object]) -> None:
        """Run a call in a thread without waiting for it, unless the web framework waits."""
        in_framework = self._in_framework(call)
        if in_framework is not None:
            await in_framework
        else:
            self._threads.submit(call).add_done_callback(self._report)

    def _measure(self) -> None:
        for clock in self._clocks:
            if clock.is_due:
                clock.certain_now()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        import asyncio

        in_framework = self._in_framework(call)
        if in_framework is not None:
            result: T = await in_framework
            return result
        future = self._threads.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._report)
            raise

    def _report(self, future: Future[Any]) -> None:
        """Log the error of a call whose caller was cancelled and therefore does not receive it."""
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._events.emit("async.failed", error=error)
