"""Mounts the console in a Flask app. See docs/console.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from flask import Flask

from delaytasks.client import DelayTasks
from delaytasks.console.application import make_console
from delaytasks.console.viewers import HostAccess, Viewer
from delaytasks.contrib.flask_mounting import delays_of, mount_wsgi
from delaytasks.core.errors import ConfigError


def mount_console(
    app: Flask, path: str, viewer: Callable[[], Viewer | None], delays: DelayTasks | None = None
) -> Flask:
    """Serve the console below a path of a Flask app, for the users of this app.

    Parameters
    ----------
    app
        The Flask app.
    path
        The path, such as `/delays`.
    viewer
        Returns the viewer of the current request, or None to refuse it. It is called in the
        request context of `app`, so it can use `current_user` of Flask-Login, or `session`.
    delays
        The `DelayTasks`. By default the `FlaskDelays` of the app.

    Returns
    -------
    flask.Flask
        The console, which is an application of its own.

    Raises
    ------
    ConfigError
        If the app has no secret key, or no `DelayTasks`.

    Examples
    --------
    >>> mount_console(app, "/delays", lambda: Viewer(current_user.name, Role.OPERATE))
    """
    found = delays or delays_of(app)
    if not app.secret_key:
        raise ConfigError("the console signs its sessions: set the secret key of the Flask app")

    def find(environ: Mapping[str, Any]) -> Viewer | None:
        # The console's own part of the path is no page of the app.
        with app.request_context(dict(environ)):
            return viewer()

    console = make_console(found, HostAccess(find), secret_key=derived_key(app.secret_key))
    mount_wsgi(app, path, console)
    return console


def derived_key(secret: str | bytes) -> str:
    """Return a key for the console's sessions, with which nobody can sign those of the host."""
    text = secret if isinstance(secret, bytes) else secret.encode()
    return hashlib.sha256(b"delaytasks console:" + text).hexdigest()
