"""Serves a WSGI application, such as the console or the HTTP API, in an ASGI application.

See docs/other-frameworks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from a2wsgi import WSGIMiddleware


def mount(app: Any, path: str, wsgi: Any) -> Any:
    """Return an ASGI application that serves `wsgi` below a path, and `app` everywhere else.

    FastAPI and Starlette applications use `mount` of `delaytasks.contrib.fastapi` instead.

    Parameters
    ----------
    app
        The ASGI application of the framework.
    path
        The path, such as `/delays`.
    wsgi
        The result of `make_console` or `make_api`, or another WSGI application. Its requests are
        served by 10 threads. The function that names a viewer of the console receives the scope.

    Returns
    -------
    callable
        The application that the ASGI server serves.

    Examples
    --------
    >>> server_app = mount(app, "/delays", make_api(delays, keys))
    """
    mounted = asgi_of(wsgi, lambda scope: scope)

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            root_path = scope.get("root_path", "") + path.rstrip("/")
            if f"{scope['path']}/".startswith(f"{root_path}/"):
                await mounted({**scope, "root_path": root_path}, receive, send)
                return
        await app(scope, receive, send)

    return served


def asgi_of(wsgi: Any, request_of: Callable[[Any], Any]) -> Any:
    """Return the ASGI application of a WSGI application.

    Parameters
    ----------
    request_of
        Returns the request of the framework for an ASGI scope.
    """
    # Imported here: the module needs Werkzeug, which the WSGI application has.
    from delaytasks.console.viewers import HOST_REQUEST

    def adapted(environ: Any, start_response: Any) -> Any:
        environ[HOST_REQUEST] = lambda: nullcontext(request_of(environ["asgi.scope"]))
        # Werkzeug reads a body without a length only if the stream is known to end.
        if "CONTENT_LENGTH" not in environ:
            environ["wsgi.input_terminated"] = True
        return wsgi(environ, start_response)

    return WSGIMiddleware(adapted)
