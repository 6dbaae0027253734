"""Mounts the console in the URLs of a Django project. See docs/console.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.http import HttpRequest

from delaytasks.client import DelayTasks
from delaytasks.core.installed import needs_extra

with needs_extra("console", "the console"):
    from flask import Flask

from delaytasks.console.application import make_console
from delaytasks.console.viewers import HostAccess, Role, Viewer
from delaytasks.contrib.django.wsgi import REQUEST_VARIABLE, wsgi_urls
from delaytasks.contrib.flask_console import derived_key


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
            return viewer(environ[REQUEST_VARIABLE])

        key = derived_key(settings.SECRET_KEY)
        return make_console(delays or api.default(), HostAccess(find), secret_key=key)

    # The console has CSRF tokens of its own.
    return wsgi_urls(console, "delaytasks-console")
