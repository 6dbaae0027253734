"""The Django app: put `delaytasks.contrib.django` into INSTALLED_APPS. See docs/django.md.

`celery -A delaytasks.contrib.django worker` serves projects that do not define a Celery app.
DJANGO_SETTINGS_MODULE names the project's settings. `mount` puts the console and the HTTP API into
the project's URLs.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import django
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt

if TYPE_CHECKING:
    from delaytasks.console.requests import Viewer


def __getattr__(name: str) -> Any:
    """Make the Celery app of the project when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from delaytasks.contrib.django.instance import project_delays
    from delaytasks.runtime import runtime_of

    # The command `celery` has this folder on the path only while it imports a module.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    django.setup()
    return runtime_of(project_delays()).celery


# -- the console and the HTTP API in the URLs of a project ----------------------------------------


def staff_viewer(request: HttpRequest) -> Viewer | None:
    """Let staff look at the console, and superusers change everything."""
    from delaytasks.console.requests import Role, Viewer

    user: Any = getattr(request, "user", None)
    if user is None or not user.is_active or not user.is_staff:
        return None
    return Viewer.of(user.get_username(), Role.ADMIN if user.is_superuser else Role.VIEW)


def mount(wsgi: Any) -> list[Any]:
    """Return URL patterns, for `include`, that serve the console or the HTTP API.

    Django checks no CSRF token of these requests, and opens no transaction for them: the
    application has tokens of its own, and writes with connections of its own, which would wait for
    the transaction on SQLite.

    Parameters
    ----------
    wsgi
        The result of `make_console` or `make_api`, or another WSGI application. The function that
        names a viewer of the console receives the `HttpRequest`.

    Examples
    --------
    >>> console = make_console(current_delays(), staff_viewer, secret_key=settings.SECRET_KEY)
    >>> urlpatterns = [path("delays/", include(mount(console)))]
    """

    # Imported here: most projects mount nothing.
    from werkzeug.test import run_wsgi_app

    def view(request: HttpRequest, path: str) -> HttpResponse:
        chunks, status, headers = run_wsgi_app(wsgi, _environ(request, path), buffered=True)
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
    return [re_path(r"^(?P<path>.*)$", exempt)]


def _environ(request: HttpRequest, path: str) -> dict[str, Any]:
    """Return the WSGI environment of a request, which may come from an ASGI server."""
    from delaytasks.operate.serving import HOST_REQUEST

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
        HOST_REQUEST: lambda: nullcontext(request),
    }
    # Werkzeug reads a body without a length only if the stream is known to end. With an ASGI server
    # it is, because Django has received the whole body.
    if isinstance(request, ASGIRequest) and "CONTENT_LENGTH" not in text:
        environ["wsgi.input_terminated"] = True
    return environ
