"""Flask: settings from the app's configuration, rows in Flask-SQLAlchemy's session, processors in an application
context. See docs/flask.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from flask import Flask, Request, abort, current_app, has_app_context
from sqlalchemy import URL, make_url

from delaytasks import api
from delaytasks.app import DelayTasks
from delaytasks.core.errors import (
    BodyNotJSONError,
    ConfigError,
    InvalidSignatureError,
    SessionUnusableError,
)
from delaytasks.core.interfaces import Transaction
from delaytasks.core.masking import Secret
from delaytasks.core.task import DelayTask
from delaytasks.storage.transactions import _PENDING, transaction_of
from delaytasks.webhooks import Received, verify
from delaytasks.wiring import Wiring


class FlaskDelays(DelayTasks):
    """Delayed tasks of one Flask app.

    >>> delays = FlaskDelays()
    >>> @delays.processor("order.close")
    ... def close_order(body): ...
    >>> def create_app():
    ...     app = Flask("shop")
    ...     db.init_app(app)
    ...     delays.init_app(app)
    ...     return app

    The Celery app is the one given, else the one in `app.extensions["celery"]`, else one made from
    `app.config["CELERY"]`. Unless `default` is False the functions of `delaytasks` itself are this object's too.
    With `join_session=False` calls never use `db.session`, and each is a transaction of its own.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        celery_app: Any = None,
        default: bool = True,
        join_session: bool = True,
    ) -> None:
        super().__init__(None)
        self._flask: Flask | None = None
        self._given = celery_app
        self._joins = join_session
        self.ambient_transaction = self._unit_of_session
        self.around.append(self._app_context)
        if default:
            api.set_default(self)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Belongs to `app` from now on. A test that makes a new app calls it again."""
        options = app.config.get("DELAYTASKS", {})
        if not isinstance(options, dict):
            raise ConfigError(
                f"app.config['DELAYTASKS'] is a dict of settings, not {type(options).__name__}"
            )
        with self._lock:
            self.close()
            self._parts = None
            self._flask = app
            self._arguments = dict(options)
            celery_app = self._given or app.extensions.get("celery") or _make_celery_app(app)
            app.extensions["celery"] = celery_app
            app.extensions["delaytasks"] = self
            if celery_app is not self.celery:
                self._attach(celery_app)
        app.teardown_appcontext(_warn_of_uncommitted)
        _ = self.settings  # what is wrong with them is said here

    @property
    def _made(self) -> Wiring:
        if self._parts is not None:
            return self._parts
        if self._flask is None:
            raise ConfigError("FlaskDelays has no app yet: call init_app(app)")
        with self._lock:
            parts = super()._made
            if not parts.settings.database_url:
                url = _url_of(self._flask)
                if url is not None:
                    parts.close()
                    self._parts = None
                    self._arguments["database_url"] = Secret(
                        url.render_as_string(hide_password=False)
                    )
        return super()._made

    def _unit_of_session(self) -> Transaction | None:
        """The request's transaction, when it is on the database that the tables are in."""
        if not self._joins or not has_app_context():
            return None
        url = _session_url()
        if url is None or not self.routes.databases.has(url):
            return None
        return transaction_of(current_app.extensions["sqlalchemy"].session)

    @contextmanager
    def _app_context(self, task: DelayTask) -> Iterator[None]:
        assert self._flask is not None
        with self._flask.app_context():
            yield
            forgotten = _uncommitted()
            if forgotten:
                raise SessionUnusableError(
                    f"the processor of {task.tag!r} scheduled {forgotten} task(s) in db.session and ended without "
                    "db.session.commit(), so they are rolled back; commit, or roll back yourself"
                )


def verified(request: Request, secrets: str | Iterable[str]) -> Received:
    """The callback that a request is, for who receives them; 401 unless it is signed by one of the secrets."""
    try:
        return verify(request.get_data(), dict(request.headers), secrets)
    except InvalidSignatureError as error:
        abort(401, str(error))
    except BodyNotJSONError as error:
        abort(400, str(error))


def _make_celery_app(app: Flask) -> Celery:
    made = Celery(app.name)
    made.config_from_object(app.config.get("CELERY", {}))
    made.set_default()  # shared tasks are its tasks
    return made


def _session_url() -> URL | None:
    """Where db.session writes; None without Flask-SQLAlchemy, or without a default database of its."""
    database = current_app.extensions.get("sqlalchemy")
    engine = None if database is None else database.engines.get(None)
    return None if engine is None else engine.url


def _url_of(app: Flask) -> URL | None:
    """That of Flask-SQLAlchemy, which knows where a relative SQLite file is, or the one in the configuration."""
    with app.app_context():
        url = _session_url()
    if url is None:
        if "SQLALCHEMY_DATABASE_URI" not in app.config:
            return None
        url = make_url(app.config["SQLALCHEMY_DATABASE_URI"])
        if url.get_backend_name() == "sqlite" and not str(url.database or "").startswith("/"):
            raise ConfigError(
                "SQLALCHEMY_DATABASE_URI is a relative SQLite file: call db.init_app(app) before delays.init_app(app), "
                "or give app.config['DELAYTASKS'] a 'database_url'"
            )
    # Workers use the driver that delaytasks comes with, whichever the app has.
    return (
        url.set(drivername="postgresql+psycopg2") if url.get_backend_name() == "postgresql" else url
    )


def _uncommitted() -> int:
    """How many tasks wait in db.session for a commit."""
    database = current_app.extensions.get("sqlalchemy")
    if database is None or not database.session.registry.has():
        return 0
    return sum(len(waiting[-2]) for waiting in database.session().info.get(_PENDING, ()))


def _warn_of_uncommitted(error: BaseException | None) -> None:
    forgotten = 0 if error is not None else _uncommitted()
    if forgotten:
        current_app.logger.warning(
            "%d delayed task(s) scheduled in db.session, which was not committed: they are rolled back",
            forgotten,
        )
