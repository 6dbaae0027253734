"""Integrates with FastAPI and Starlette: lifespan, the request's transaction, and the console.

See docs/fastapi.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.applications import Starlette
from starlette.requests import Request

from delaytasks.client import DelayTasks
from delaytasks.runtime import runtime_of

if TYPE_CHECKING:
    from delaytasks.console.viewers import Viewer

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
        runtime_of(delays)
        try:
            if lifespan is None:
                yield None
            else:
                async with lifespan(app) as state:
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
    # Imported here: Starlette applications do not need FastAPI.
    from fastapi import Depends

    async def transaction() -> AsyncIterator[AsyncSession]:
        async with sessions.begin() as session:
            yield session

    # With the default scope, the commit would follow the response, and its failure would be lost.
    return Depends(transaction, scope="function")


def mount_wsgi(app: Starlette, path: str, wsgi: Any) -> None:
    """Serve a WSGI application, such as the console, below a path of the application.

    Parameters
    ----------
    app
        A FastAPI or Starlette application.
    path
        The path, such as `/delays`.
    wsgi
        The WSGI application. Its requests are served by 10 threads.

    Examples
    --------
    >>> mount_wsgi(app, "/delays", make_console(delays, users))
    """
    # Imported here: applications that mount nothing need no a2wsgi.
    from delaytasks.contrib.asgi import asgi_of

    app.mount(path, asgi_of(wsgi))


def mount_console(
    app: Starlette,
    path: str,
    delays: DelayTasks,
    viewer: Callable[[Request], Viewer | None],
    *,
    secret_key: str,
) -> None:
    """Serve the console below a path, for the users of the application.

    Parameters
    ----------
    app
        A FastAPI or Starlette application.
    path
        The path, such as `/delays`.
    delays
        The `DelayTasks` whose tasks the console shows.
    viewer
        Returns the `Viewer` of a request, or None to refuse the request. The function runs in a
        thread, and must not be a coroutine function. `request.session` and `request.user` are those
        of the application's middleware.
    secret_key
        The secret of the application. A key is derived from it for the console's own sessions.

    Examples
    --------
    >>> mount_console(app, "/delays", delays, viewer_of, secret_key=settings.secret_key)
    """
    # Imported here: applications without the console need no Flask.
    from delaytasks.console.application import make_console
    from delaytasks.console.viewers import HostAccess, derived_key

    def find(environ: Mapping[str, Any]) -> Viewer | None:
        return viewer(Request(environ["asgi.scope"]))

    key = derived_key(secret_key)
    mount_wsgi(app, path, make_console(delays, HostAccess(find), secret_key=key))
