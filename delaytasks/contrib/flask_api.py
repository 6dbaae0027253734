"""Mounts the HTTP API in a Flask app. See docs/http-api.md."""

from __future__ import annotations

from typing import Any

from flask import Flask

from delaytasks.client import DelayTasks
from delaytasks.contrib.flask_mounting import delays_of, mount_wsgi
from delaytasks.http_api.api_keys import FindsKeys
from delaytasks.http_api.application import make_api


def mount_api(
    app: Flask, path: str, keys: FindsKeys, delays: DelayTasks | None = None, **options: Any
) -> Flask:
    """Serve the HTTP API below a path of a Flask app.

    Parameters
    ----------
    app
        The Flask app.
    path
        The path, such as `/delays`.
    keys
        The API keys.
    delays
        The `DelayTasks`. By default the `FlaskDelays` of the app.
    **options
        The options of `make_api`.

    Returns
    -------
    flask.Flask
        The API, which is an application of its own.

    Raises
    ------
    ConfigError
        If the app has no `DelayTasks`.

    Examples
    --------
    >>> mount_api(app, "/delays", ApiKeyFile(Path("api-keys.json")))
    """
    api = make_api(delays or delays_of(app), keys, **options)
    mount_wsgi(app, path, api)
    return api
