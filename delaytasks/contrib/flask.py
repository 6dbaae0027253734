"""Integrates with Flask: configuration, sessions of Flask-SQLAlchemy and application contexts.

Also mounts the console and the HTTP API. See docs/frameworks.md.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery
from flask import Flask, Request, current_app, has_app_context, request
from sqlalchemy import URL
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from delaytasks.attachment import attach
from delaytasks.celery import set_project_delays
from delaytasks.client import DelayTasks
from delaytasks.db.engines import is_same_database
from delaytasks.db.sessions import _PENDING, transaction_of
from delaytasks.model.errors import ConfigError, SessionUnusableError
from delaytasks.model.task import DelayedTask, Transaction
from delaytasks.model.text import Secret, count
from delaytasks.runtime import ProcessorContext, Runtime, runtime_of
from delaytasks.settings import load_settings

if TYPE_CHECKING:
    from delaytasks.settings import Settings


class FlaskDelays(DelayTasks):
    """Delayed tasks of one Flask app.

    Parameters
    ----------
    app
        The Flask app. Without it, call `init_app` later.
    celery_app
        The Celery app. By default the app in `app.extensions["celery"]`, else one that is made
        from `app.config["CELERY"]`.
    default
        Whether `current_delays` returns this object, which the functions of the package use too.

    Examples
    --------
    >>> delays = FlaskDelays()
    >>> @delays.processor("order.close")
    ... def close_order(body): ...
    >>> def create_app():
    ...     app = Flask("shop")
    ...     db.init_app(app)
    ...     delays.init_app(app)
    ...     return app
    """

    _tables_remedy = "run: flask --app APP delays db upgrade"

    def __init__(
        self, app: Flask | None = None, *, celery_app: Any = None, default: bool = True
    ) -> None:
        super().__init__(None)
        self._flask: Flask | None = None
        self._given_celery = celery_app
        if default:
            set_project_delays(self)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Belong to `app` from now on. A test that makes a new app calls `init_app` again.

        Parameters
        ----------
        app
            The Flask app. `app.config["DELAYTASKS"]` is a dict of settings.

        Raises
        ------
        ConfigError
            If a setting is wrong.

        Examples
        --------
        >>> delays.init_app(app)
        """
        options = app.config.get("DELAYTASKS", {})
        if not isinstance(options, dict):
            raise ConfigError(
                f"app.config['DELAYTASKS'] is a dict of settings, not {type(options).__name__}"
            )
        with self._lock:
            self._renew_runtime()
            self._flask = app
            self._arguments = dict(options)
            celery_app = self._given_celery or app.extensions.get("celery") or _make_celery(app)
            app.extensions["celery"] = celery_app
            app.extensions["delaytasks"] = self
            if celery_app is not self._celery:
                self._celery = celery_app
                attach(celery_app, self)
        app.teardown_appcontext(_warn_of_uncommitted)
        runtime_of(self)  # raises the errors of wrong settings

    def _make_runtime(self, **changes: Any) -> Runtime:
        if self._flask is None:
            raise ConfigError("FlaskDelays has no app yet: call init_app(app)")
        settings: Settings = load_settings(self._celery.conf, os.environ, **self._arguments)
        url = None if settings.database_url else _url_of(self._flask)
        if url is not None:
            self._arguments["database_url"] = Secret(url.render_as_string(hide_password=False))
        return super()._make_runtime(**changes)

    def _ambient_transaction(self) -> Transaction | None:
        """Return the request's transaction if it is on the database of the tables."""
        if not has_app_context():
            return None
        url = _session_url()
        if url is None:
            return None
        database = runtime_of(self).store.database
        if not is_same_database(database.url, url):
            return None
        session = current_app.extensions["sqlalchemy"].session
        transaction = transaction_of(session, database.remedy_at)
        transaction.reports_changes = True
        return transaction

    def _in_framework(self, call: Callable[[], Any]) -> Awaitable[Any] | None:
        """Run the call in the thread of the request, if it may use `db.session`.

        Several threads must not use one session. Flask runs each asynchronous view in an event loop
        of its own, which no other request shares.
        """
        return None if self._ambient_transaction() is None else _called(call)

    def _processor_contexts(self) -> Sequence[ProcessorContext]:
        return [self._app_context]

    @contextmanager
    def _app_context(self, task: DelayedTask) -> Iterator[None]:
        assert self._flask is not None
        with self._flask.app_context():
            yield
            uncommitted = _uncommitted()
            if uncommitted:
                raise SessionUnusableError(
                    f"the processor of {task.tag!r} made {count(uncommitted, 'change')} of tasks "
                    "in db.session and ended without db.session.commit(), so the transaction is "
                    "rolled back; commit, or roll back yourself"
                )


def mount(app: Flask, path: str, wsgi: Any) -> None:
    """Serve the console or the HTTP API below a path of a Flask app.

    Parameters
    ----------
    app
        The Flask app.
    path
        The path, such as `/delays`.
    wsgi
        The result of `make_console` or `make_api`, or another WSGI application. It runs in no
        context of `app`. Only the function that names a viewer of the console is called in the
        request context, so it can use `current_user` of Flask-Login, or `session`.

    Examples
    --------
    >>> mount(app, "/delays", make_console(delays, viewer, secret_key=app.secret_key))
    """
    # Imported here: most apps mount nothing.
    from delaytasks.operate.serving import HOST_REQUEST

    def mounted(environ: dict[str, Any], start_response: Any) -> Any:
        @contextmanager
        def request_of_app() -> Iterator[Request]:
            # The part of the path that belongs to the console is no page of the app.
            with app.request_context(dict(environ)):
                yield request

        return wsgi({**environ, HOST_REQUEST: request_of_app}, start_response)

    mounts: dict[str, Any] = {path.rstrip("/"): mounted}
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, mounts)  # type: ignore[method-assign]


def _make_celery(app: Flask) -> Celery:
    made = Celery(app.name)
    made.config_from_object(app.config.get("CELERY", {}))
    made.set_default()  # shared tasks belong to this app
    return made


async def _called(call: Callable[[], Any]) -> Any:
    return call()


def _session_url() -> URL | None:
    """Return the URL of db.session; None without Flask-SQLAlchemy or without a default database."""
    database = current_app.extensions.get("sqlalchemy")
    engine = None if database is None else database.engines.get(None)
    # A test may have replaced the engine by a connection, which has the engine.
    return None if engine is None else engine.engine.url


def _url_of(app: Flask) -> URL | None:
    """Return the URL of Flask-SQLAlchemy, which knows the folder of a relative SQLite file."""
    with app.app_context():
        url = _session_url()
    if url is None and "SQLALCHEMY_DATABASE_URI" in app.config:
        raise ConfigError(
            "Flask-SQLAlchemy does not know the app: call db.init_app(app) before "
            "delays.init_app(app), or give app.config['DELAYTASKS'] a 'database_url'"
        )
    return url


def _uncommitted() -> int:
    """Return how many calls have scheduled, moved or cancelled tasks without a commit."""
    database = current_app.extensions.get("sqlalchemy")
    if database is None or not database.session.registry.has():
        return 0
    return len(database.session().info.get(_PENDING, ()))


def _warn_of_uncommitted(error: BaseException | None) -> None:
    uncommitted = 0 if error is not None else _uncommitted()
    if uncommitted:
        current_app.logger.warning(
            "the app context ends without db.session.commit(), "
            "which rolls back %s of delayed tasks",
            count(uncommitted, "change"),
        )
