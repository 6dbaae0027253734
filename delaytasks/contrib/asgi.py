"""Integrates with FastAPI and Starlette.

A lifespan opens and closes a `DelayTasks`, a dependency of FastAPI is the transaction of a request,
and `mount` serves the console or the HTTP API. See docs/frameworks.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from delaytasks.client import DelayTasks
from delaytasks.runtime import runtime_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def delays_lifespan(delays: DelayTasks, lifespan: Lifespan | None = None) -> Lifespan:
    """Return a lifespan that opens `delays` when the application starts, and closes it at the end.

    Parameters
    ----------
    delays
        The `DelayTasks` of the application.
    lifespan
        The lifespan of the application itself. It begins after `delays` is open and ends before
        `delays` is closed.

    Returns
    -------
    callable
        The argument `lifespan` of `FastAPI` or `Starlette`. A wrong setting raises `ConfigError`
        at the start instead of in the first request.

    Examples
    --------
    >>> app = FastAPI(lifespan=delays_lifespan(delays))
    """

    @asynccontextmanager
    async def opened(app: Any) -> AsyncIterator[Any]:
        # The first connection sets up an SQLite file, for which no request may have locked it.
        await asyncio.to_thread(runtime_of(delays).clock.refresh_if_due)
        try:
            async with nullcontext() if lifespan is None else lifespan(app) as state:
                yield state
        finally:
            await delays.aclose()

    return opened


def request_transaction(sessions: async_sessionmaker[AsyncSession]) -> Any:
    """Return a FastAPI dependency: an `AsyncSession` whose transaction ends with the function.

    The transaction is committed when the path operation function has returned, before the
    response is sent. If the function raises, also an `HTTPException`, it is rolled back.

    Parameters
    ----------
    sessions
        Makes the sessions.

    Returns
    -------
    fastapi.params.Depends
        The dependency.

    Examples
    --------
    >>> Transaction = Annotated[AsyncSession, request_transaction(async_sessionmaker(engine))]
    >>> @app.post("/orders/{id}")
    ... async def create_order(id: int, session: Transaction):
    ...     await delays.aschedule_delay("order.close", {"order": id}, 1800, session=session)
    """
    # Imported here: other applications do not need FastAPI.
    from fastapi import Depends

    # With the scope "request", which is the default, the commit would follow the response, and its
    # failure would be lost.
    async def transaction() -> AsyncIterator[Any]:
        async with sessions.begin() as session:
            yield session

    return Depends(transaction, scope="function")


def mount(app: Any, path: str, wsgi: Any) -> None:
    """Serve the console or the HTTP API below a path of a FastAPI or Starlette application.

    Parameters
    ----------
    app
        The application.
    path
        The path, such as `/delays`.
    wsgi
        The result of `make_console` or `make_api`, or another WSGI application. Its requests are
        served by 10 threads. The function that names a viewer of the console runs in one of them.
        It receives the `Request`, whose `session` and `user` are those of the application's
        middleware.

    Examples
    --------
    >>> mount(app, "/delays", make_console(delays, viewer, secret_key=settings.secret_key))
    """
    # Imported here: applications that mount nothing need none of them.
    from a2wsgi import WSGIMiddleware
    from starlette.requests import Request

    from delaytasks.operate.serving import HOST_REQUEST

    def adapted(environ: Any, start_response: Any) -> Any:
        environ[HOST_REQUEST] = lambda: nullcontext(Request(environ["asgi.scope"]))
        # Werkzeug reads a body without a length only if the stream is known to end.
        if "CONTENT_LENGTH" not in environ:
            environ["wsgi.input_terminated"] = True
        return wsgi(environ, start_response)

    app.mount(path, WSGIMiddleware(adapted))
