"""Serves a WSGI application below a path of a Django project, also with an ASGI server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt
from werkzeug.test import run_wsgi_app

#: The name of Django's request in the WSGI environment.
REQUEST_VARIABLE = "delaytasks.django_request"


def wsgi_urls(application: Callable[[], Any], name: str) -> list[Any]:
    """Return the URL patterns of a WSGI application, which `application` returns.

    Django checks no CSRF token of these requests, and opens no transaction for them: the
    application writes with connections of its own, which would wait for it on SQLite.
    """

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
        REQUEST_VARIABLE: request,
    }
    # Werkzeug reads a body without a length only if the stream is known to end. With an ASGI server
    # it is, because Django has received the whole body.
    if isinstance(request, ASGIRequest) and "CONTENT_LENGTH" not in text:
        environ["wsgi.input_terminated"] = True
    return environ
