"""The `DelayTasks` of a Django project, from settings.DELAYTASKS and settings.DATABASES."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from celery import Celery, _state
from django.conf import settings
from django.db import Error, close_old_connections, connections
from django.utils.module_loading import autodiscover_modules, import_string
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from delaytasks.client import DelayTasks
from delaytasks.contrib.django.django_connection import (
    MIGRATE_REMEDY,
    DjangoConnection,
    DjangoTransaction,
    database_url,
)
from delaytasks.db.types import db_now
from delaytasks.model.errors import ConfigError
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import Secret
from delaytasks.runtime import ProcessorContext, Runtime, runtime_of

if TYPE_CHECKING:
    from delaytasks.db.sessions import ConnectionSource

_TASKS_BACKEND = "delaytasks.contrib.django.tasks_backend."


class DjangoDelays(DelayTasks):
    """Delayed tasks whose rows are written on a connection of Django's."""

    _tables_remedy = MIGRATE_REMEDY

    def __init__(self, celery_app: Any, alias: str = "default", **options: Any) -> None:
        if not isinstance(alias, str) or alias not in connections.settings:
            raise ConfigError(
                f"settings.DELAYTASKS['database'] = {alias!r} is not one alias of "
                f"settings.DATABASES ({', '.join(map(repr, connections.settings))}); several "
                "databases need a DelayTasks of your own"
            )
        self.alias = alias
        #: The name of the database that the runtime was made for.
        self._database: Any = None
        super().__init__(celery_app, **options)

    def import_processors(self) -> None:
        """Import `delays.py` of every installed app.

        Tasks of Django's Tasks framework are in `tasks.py`.
        """
        backends = (getattr(settings, "TASKS", None) or {}).values()
        has_tasks = any(str(each.get("BACKEND")).startswith(_TASKS_BACKEND) for each in backends)
        autodiscover_modules("delays", *(["tasks"] if has_tasks else []))

    @property
    def _runtime(self) -> Runtime:
        """Made anew when Django's test runner gives the database another name."""
        name = connections.settings[self.alias]["NAME"]
        if self._made is None or name != self._database:
            with self._lock:
                if self._made is not None and name != self._database:
                    self._renew_runtime()
                connection = connections[self.alias]
                url = database_url(connection.vendor, connection.settings_dict)
                self._arguments["database_url"] = Secret(url)
                self._database = name
        return super()._runtime

    def _ambient_transaction(self) -> DjangoTransaction:
        return DjangoTransaction(self.alias, is_robust=not self._is_in_test)

    def _processor_contexts(self) -> Sequence[ProcessorContext]:
        return [self._closes_connections]

    def _in_framework(self, call: Callable[[], Any]) -> Awaitable[Any]:
        """Run the call in the thread where Django's asynchronous ORM has its connection."""
        result: Awaitable[Any] = sync_to_async(call, thread_sensitive=True)()
        return result

    def _test_connections(self) -> ConnectionSource:
        from delaytasks.contrib.django.django_connection import source_at

        return source_at(self.alias)

    @contextmanager
    def _closes_connections(self, task: DelayedTask) -> Iterator[None]:
        """Close the connections that Django's async calls have in a thread of asgiref.

        Celery's signals do not reach that thread.
        """
        try:
            yield
        finally:
            # A test has its transaction on the only connection.
            processor = None if self._is_in_test else self._registry.get(task.tag)
            if processor is not None and iscoroutinefunction(processor.function):
                from delaytasks.run.calls import result_of

                result_of(sync_to_async(close_old_connections)())

    def _database_now(self, insists: bool) -> datetime:
        """Read the time on Django's connection, unless this is a worker.

        A connection of our own would stay open, and Django's test runner could not drop its
        database then. A worker has connections of its own in any case, and threads in which
        Django's connections would never be closed.
        """
        if self._processes.is_worker:
            return super()._database_now(insists)
        try:
            now: datetime = (
                DjangoConnection(connections[self.alias]).execute(select(db_now())).scalar_one()
            )
        except (Error, DBAPIError):
            with DjangoTransaction(self.alias).guard():  # translates the error
                raise
        return now


@lru_cache(maxsize=1)
def project_delays() -> DjangoDelays:
    """Return the instance of the project, made by the first call."""
    options = getattr(settings, "DELAYTASKS", {})
    if not isinstance(options, dict):
        raise ConfigError(
            f"settings.DELAYTASKS is a dict of settings, not {type(options).__name__}"
        )
    options = dict(options)
    if "database_url" in options:
        raise ConfigError(
            "settings.DELAYTASKS has 'database_url', but rows are written on a connection of "
            "Django's: name an alias of settings.DATABASES as 'database' instead"
        )
    path, alias = options.pop("celery_app", None), options.pop("database", "default")
    delays = DjangoDelays(_celery_app(path), alias, **options)
    try:
        runtime_of(delays)  # raises the errors of wrong settings
    except ConfigError as error:
        raise ConfigError(f"{error} (see settings.DELAYTASKS)") from None
    return delays


def _celery_app(path: str | None) -> Any:
    """Return the app at `path`, else the current app, else an app made from Django's settings."""
    if path is not None:
        found = import_string(path.replace(":", "."))
        if not isinstance(found, Celery):
            raise ConfigError(
                f"settings.DELAYTASKS['celery_app'] = {path!r} is a {type(found).__name__}, not a "
                "Celery app"
            )
        return found
    current = _state._tls.current_app or _state.default_app
    if current is not None:
        return current
    urls = getattr(settings, "ROOT_URLCONF", None)  # a project without views need not have it
    made = Celery(str(urls).partition(".")[0] if urls else "django")
    made.config_from_object("django.conf:settings", namespace="CELERY")
    made.autodiscover_tasks()
    return made
