"""The event loop of a process, in which processors that are `async def` run."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import CoroutineType
from typing import Any

from delaytasks.core.clock import reset_in_child

#: The value of a coroutine, or its error.
ResultAndError = tuple[Any, BaseException | None]


#: Runs the coroutines of this context in place of the event loop. A test runs them in its own
#: thread or event loop, where its connections are.
run_coroutine: contextvars.ContextVar[Callable[[Coroutine[Any, Any, Any]], Any] | None] = (
    contextvars.ContextVar("run_coroutine", default=None)
)


class EventLoop:
    """An event loop in a thread of its own, which the first coroutine starts.

    All processors share one loop, and thus its clients and connections.
    """

    def __init__(self) -> None:
        self._at_start: list[Callable[[], None]] = []
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[None]] = set()

    def result_of(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine with the caller's context variables, and return its result."""
        if (run := run_coroutine.get()) is not None:
            return run(coroutine)
        answer: Future[ResultAndError] = Future()

        def start() -> None:
            task = asyncio.ensure_future(_into(answer, coroutine))
            self._running.add(task)  # the loop itself has weak references only
            task.add_done_callback(self._running.discard)

        self._started().call_soon_threadsafe(start, context=contextvars.copy_context())
        value, error = answer.result()
        if error is not None:
            raise error
        return value

    def at_start(self, call: Callable[[], None]) -> None:
        """Call it once in the thread of each event loop, before the coroutines that follow."""
        with self._lock:
            if call not in self._at_start:
                self._at_start.append(call)
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(call)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                for call in self._at_start:
                    self._loop.call_soon(call)
                threading.Thread(
                    target=self._loop.run_forever, name="delaytasks-async", daemon=True
                ).start()
            return self._loop


async def _into(answer: Future[ResultAndError], coroutine: Coroutine[Any, Any, Any]) -> None:
    """Pass on every exception, since an exit would end the loop and all coroutines in it."""
    try:
        answer.set_result((await coroutine, None))
    except BaseException as error:
        answer.set_result((None, error))


_of_process = EventLoop()
result_of = _of_process.result_of
at_start = _of_process.at_start


def awaited(value: Any) -> Any:
    """Return what a processor returned; if this is a coroutine, run it and return its result."""
    return result_of(value) if type(value) is CoroutineType else value
