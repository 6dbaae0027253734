"""The asynchronous twins of the methods that wait for a database or a broker.

A twin is one line beside its method: `acancel = twin(cancel)`. It has the parameters of the method,
its result and its errors, and runs the method without blocking the event loop: on the caller's
`AsyncSession` or `AsyncConnection`, in a thread of a pool, or as a web framework requires.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from delaytasks.loops import ThreadPool

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
#: The calls that start in one turn of an event loop. Each takes up to half a millisecond of the
#: loop's thread, so a burst of some hundred calls would delay all other callbacks by the sum.
STARTS_PER_TURN = 8


class RunsAsync(Protocol):
    """An object whose methods have twins."""

    @property
    def _run_async(self) -> Callable[..., Awaitable[Any]]:
        """Run a method with its arguments, as `AsyncCalls.run` does."""


Self_ = TypeVar("Self_", bound=RunsAsync)


def twin(
    method: Callable[Concatenate[Self_, P], T],
) -> Callable[Concatenate[Self_, P], Coroutine[Any, Any, T]]:
    """Return the asynchronous twin of a method, for the body of its class.

    Examples
    --------
    >>> acancel = twin(cancel)
    """
    name, code = method.__name__, method.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    # `AsyncCalls.run` looks for the session of `transaction` if a method can take one.
    default: dict[str, Any] = {"session": None} if "session" in parameters else {}

    @functools.wraps(method)
    async def run(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._run_async(getattr(self, name), *args, **{**default, **kwargs})
        return result

    summary = (method.__doc__ or "").partition("\n\n")[0]
    run.__name__ = f"a{name}"
    run.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.a{name}"
    run.__doc__ = f"{summary}\n\nThis is the asynchronous twin of `{name}`."
    return run


class CallGroup:
    """Methods of a `DelayTasks` that share a name of their own, such as `delays.bulk`."""

    def __init__(self, delays: DelayTasks) -> None:
        self._delays = delays

    @property
    def _runtime(self) -> Runtime:
        return self._delays._runtime

    @property
    def _run_async(self) -> Callable[..., Awaitable[Any]]:
        return self._delays._run_async


class AsyncCalls:
    """Runs a call on the caller's `AsyncSession` or `AsyncConnection`, else in a thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # As many as an engine keeps connections, so that concurrent calls do not wait for one.
        self._threads = ThreadPool(runtime.settings.pool_size, "delaytasks-async")
        #: The last event loop, and what limits the calls that start in each of its turns.
        self._starts: tuple[object, asyncio.Semaphore] = None, asyncio.Semaphore(STARTS_PER_TURN)

    async def run(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Return the result of a synchronous method."""
        loop = asyncio.get_running_loop()
        of, starts = self._starts
        if of is not loop:
            starts = asyncio.Semaphore(STARTS_PER_TURN)
            self._starts = loop, starts
        await starts.acquire()
        loop.call_soon(starts.release)  # in the next turn
        has_session = "session" in options
        session = options.pop("session", None)
        if has_session and session is None:
            session = self._runtime.transactions.current_session()
        call = partial(method, *arguments, **options)
        if session is None:
            return await self._in_thread(call)
        from delaytasks.db.database import run_in_session

        clock = self._runtime.clock
        if clock.is_due:  # it must not be read from the database on the event loop
            await self._in_thread(clock.certain_now)
        return await run_in_session(session, lambda session: call(session=session))

    def close(self) -> None:
        self._threads.close()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        in_framework = self._runtime.in_framework(call)
        result: T = await (in_framework or asyncio.wrap_future(self._threads.submit(call)))
        return result
