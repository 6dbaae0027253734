"""Mounts the console in the URLs of a Django project. See docs/console.md."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt
from flask import Flask
from werkzeug.test import run_wsgi_app

from delaytasks.client import DelayTasks
from delaytasks.console.application import make_console
from delaytasks.console.viewers import HostAccess, Role, Viewer
from delaytasks.contrib.flask_console import derived_key

#: The name of the request in the WSGI environment of the console.
_REQUEST = "delaytasks.django_request"


def staff_viewer(request: HttpRequest) -> Viewer | None:
    """Let staff look at the console, and superusers change everything."""
    user: Any = getattr(request, "user", None)
    if user is None or not user.is_active or not user.is_staff:
        return None
    return Viewer.of(user.get_username(), Role.ADMIN if user.is_superuser else Role.VIEW)


def console_urls(
    viewer: Callable[[HttpRequest], Viewer | None] = staff_viewer,
    delays: DelayTasks | None = None,
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

    @functools.cache
    def console() -> Flask:
        # Made with the first request: the settings may not be complete before.
        from delaytasks import api

        def find(environ: Mapping[str, Any]) -> Viewer | None:
            return viewer(environ[_REQUEST])

        key = derived_key(settings.SECRET_KEY)
        return make_console(delays or api.default(), HostAccess(find), secret_key=key)

    def view(request: HttpRequest, path: str) -> HttpResponse:
        chunks, status, headers = run_wsgi_app(console(), _environ(request, path), buffered=True)
        response = HttpResponse(b"".join(chunks), status=int(status.split()[0]))
        del response.headers["Content-Type"]
        for name, value in headers:
            if name.lower() == "set-cookie":
                response.cookies.load(value)
            else:
                response.headers[name] = value
        return response

    # The console has CSRF tokens of its own.
    return [re_path(r"^(?P<path>.*)$", csrf_exempt(view), name="delaytasks-console")]


def _environ(request: HttpRequest, path: str) -> dict[str, Any]:
    """Return the WSGI environment of a request, which may come from an ASGI server."""
    script = request.path[: len(request.path) - len(path)].rstrip("/")
    text = {name: value for name, value in request.META.items() if isinstance(value, str)}
    return {
        **text,
        "SCRIPT_NAME": script,
        "PATH_INFO": f"/{path}",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": request.scheme,
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        _REQUEST: request,
    }
