"""Runs the synchronous code on the caller's `AsyncSession` or `AsyncConnection`.

SQLAlchemy runs the code in a greenlet of the event loop's thread. A statement on the caller's
connection switches to the event loop until the answer arrives. All other calls that wait for a
network leave this thread through `off_the_loop`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy import exc
from sqlalchemy.util import await_only, greenlet_spawn
from sqlalchemy.util.concurrency import in_greenlet

from delaytasks.core.errors import SessionUnusableError
from delaytasks.core.loop import ThreadPool

T = TypeVar("T")
#: The threads of `off_the_loop`. They send messages of committed tasks.
_threads = ThreadPool(4, "delaytasks-loop")


async def run_in_session(session: Any, call: Callable[[Any], T]) -> T:
    """Return `call(session)`, where `call` gets the synchronous form of the caller's session.

    Raises
    ------
    SessionUnusableError
        If the session is not asynchronous, or its connection was not opened.
    """
    given = type(session).__name__
    if callable(getattr(session, "registry", None)):
        session = session()  # async_scoped_session
    if not inspect.iscoroutinefunction(getattr(session, "run_sync", None)):
        raise SessionUnusableError(
            f"the asynchronous methods take an AsyncSession or AsyncConnection as session=, not "
            f"{given}: with a Session or Connection, call the synchronous method"
        )
    try:
        result: T = await session.run_sync(call)
    except exc.InvalidRequestError as error:  # such as a connection that was not opened
        raise SessionUnusableError(f"the caller's session cannot be used: {error}") from error
    return result


def is_on_the_loop() -> bool:
    """Whether SQLAlchemy runs this code in a greenlet of an event loop's thread."""
    return "greenlet" in sys.modules and in_greenlet()


async def on_the_loop(call: Callable[[], T]) -> T:
    """Return `call()`, which runs in a greenlet of the event loop's thread."""
    result: T = await greenlet_spawn(call)
    return result


def awaited_on_the_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await the coroutine, with the present context variables, in the event loop of this thread."""
    return await_only(asyncio.ensure_future(coroutine))


def off_the_loop(call: Callable[[], T]) -> T:
    """Return `call()`, which runs in another thread if this is the thread of an event loop.

    If the waiting task is cancelled meanwhile, the call goes on.
    """
    return await_only(_in_thread(call)) if is_on_the_loop() else call()


async def _in_thread(call: Callable[[], T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(_threads.submit(call)))
