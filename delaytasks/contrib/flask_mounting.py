"""Serves other WSGI applications below a path of a Flask app."""

from __future__ import annotations

from typing import Any

from flask import Flask
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from delaytasks.client import DelayTasks
from delaytasks.core.errors import ConfigError


def delays_of(app: Flask) -> DelayTasks:
    """Return the `FlaskDelays` of an app."""
    found: DelayTasks | None = app.extensions.get("delaytasks")
    if found is None:
        raise ConfigError("the Flask app has no FlaskDelays: call init_app(app), or give delays=")
    return found


def mount_wsgi(app: Flask, path: str, wsgi: Any) -> None:
    """Serve a WSGI application below a path. It runs in no context of `app`."""
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {path.rstrip("/"): wsgi})  # type: ignore[method-assign]
