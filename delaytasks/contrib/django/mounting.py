"""Mounts the console and the HTTP API in Django's URLs, and receives signed callbacks.

See docs/console.md and docs/http-api.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from delaytasks.client import DelayTasks
from delaytasks.core.errors import InvalidInputError
from delaytasks.current import current_delays
from delaytasks.webhooks.signatures import status_of, verify

if TYPE_CHECKING:
    from flask import Flask

    from delaytasks.console.viewers import Viewer
    from delaytasks.http_api.api_keys import FindsKeys


#: The name of Django's request in the WSGI environment.
_REQUEST_VARIABLE = "delaytasks.django_request"


def staff_viewer(request: HttpRequest) -> Viewer | None:
    """Let staff look at the console, and superusers change everything."""
    from delaytasks.console.viewers import Role, Viewer

    user: Any = getattr(request, "user", None)
    if user is None or not user.is_active or not user.is_staff:
        return None
    return Viewer.of(user.get_username(), Role.ADMIN if user.is_superuser else Role.VIEW)


def console_urls(
    viewer: Callable[[HttpRequest], Viewer | None] = staff_viewer, delays: DelayTasks | None = None
) -> list[Any]:
    """Return the URL patterns of the console, for `include`.

    Parameters
    ----------
    viewer
        Returns the viewer of a request, or None to refuse it.
    delays
        The `DelayTasks`. By default that of the project.

    Examples
    --------
    >>> urlpatterns = [path("delays/", include(console_urls()))]
    """

    # Imported here: most projects do not mount it.
    from delaytasks.console.application import make_console
    from delaytasks.console.viewers import HostAccess, derived_key

    @functools.cache
    def console() -> Flask:
        # Made with the first request: the settings may not be complete before.
        def find(environ: Mapping[str, Any]) -> Viewer | None:
            return viewer(environ[_REQUEST_VARIABLE])

        key = derived_key(settings.SECRET_KEY)
        return make_console(delays or current_delays(), HostAccess(find), secret_key=key)

    # The console has CSRF tokens of its own.
    return _wsgi_urls(console, "delaytasks-console")


def api_urls(keys: FindsKeys, delays: DelayTasks | None = None, **options: Any) -> list[Any]:
    """Return the URL patterns of the HTTP API, for `include`.

    Parameters
    ----------
    keys
        The API keys.
    delays
        The `DelayTasks`. By default that of the project.
    **options
        The options of `make_api`.

    Examples
    --------
    >>> keys = ApiKeyFile(Path("api-keys.json"))
    >>> urlpatterns = [path("delays/", include(api_urls(keys)))]
    """

    # Imported here: most projects do not mount it.
    from delaytasks.http_api.routes import make_api

    @functools.cache
    def made() -> Flask:
        # Made with the first request: the settings may not be complete before.
        return make_api(delays or current_delays(), keys, **options)

    return _wsgi_urls(made, "delaytasks-api")


def _wsgi_urls(application: Callable[[], Any], name: str) -> list[Any]:
    """Return the URL patterns of a WSGI application, which `application` returns.

    Django checks no CSRF token of these requests, and opens no transaction for them: the
    application writes with connections of its own, which would wait for it on SQLite.
    """

    from werkzeug.test import run_wsgi_app

    def view(request: HttpRequest, path: str) -> HttpResponse:
        chunks, status, headers = run_wsgi_app(
            application(), _environ(request, path), buffered=True
        )
        response = HttpResponse(b"".join(chunks), status=int(status.split()[0]))
        del response.headers["Content-Type"]
        for header, value in headers:
            if header.lower() == "set-cookie":
                response.cookies.load(value)
            else:
                response.headers[header] = value
        return response

    exempt: Any = csrf_exempt(view)
    for alias in connections:
        exempt = transaction.non_atomic_requests(using=alias)(exempt)
    return [re_path(r"^(?P<path>.*)$", exempt, name=name)]


def _environ(request: HttpRequest, path: str) -> dict[str, Any]:
    """Return the WSGI environment of a request, which may come from an ASGI server."""
    script = request.path[: len(request.path) - len(path)].rstrip("/")
    text = {name: value for name, value in request.META.items() if isinstance(value, str)}
    environ = {
        **text,
        "SCRIPT_NAME": script,
        "PATH_INFO": f"/{path}",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": request.scheme,
        # Django would limit request.body. The application has a limit of its own.
        "wsgi.input": request,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        _REQUEST_VARIABLE: request,
    }
    # Werkzeug reads a body without a length only if the stream is known to end. With an ASGI server
    # it is, because Django has received the whole body.
    if isinstance(request, ASGIRequest) and "CONTENT_LENGTH" not in text:
        environ["wsgi.input_terminated"] = True
    return environ


# -- Verifies the callbacks that a Django project receives ----------------------------------------


def verified(
    secrets: str | Iterable[str],
) -> Callable[[Callable[..., HttpResponse]], Callable[..., HttpResponse]]:
    """Decorate a view `f(request, callback)` so that only signed callbacks reach it.

    Other requests are answered with 401. The signature replaces Django's CSRF token.

    Parameters
    ----------
    secrets
        The secret, or the secrets while they are rotated, that sign callbacks.

    Returns
    -------
    callable
        The decorator.

    Examples
    --------
    >>> @verified(settings.CALLBACK_SECRET)
    ... def order_closed(request, callback): ...
    """

    def decorate(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        @functools.wraps(view)
        def check(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            try:
                callback = verify(request.body, request.headers, secrets)
            except InvalidInputError as error:
                return HttpResponse(str(error), status=status_of(error), content_type="text/plain")
            return view(request, callback, *args, **kwargs)

        receive: Callable[..., HttpResponse] = csrf_exempt(require_POST(check))
        return receive

    return decorate
