"""The one `DelayTasks` of a Django project, made from settings.DELAYTASKS and settings.DATABASES."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import sync_to_async
from celery import Celery, _state
from django.conf import settings
from django.db import Error, close_old_connections, connections
from django.utils.module_loading import autodiscover_modules, import_string
from sqlalchemy import select

from delaytasks.app import DelayTasks
from delaytasks.contrib.django.executor import DjangoExecutor
from delaytasks.contrib.django.transaction import DjangoTransaction
from delaytasks.contrib.django.url import database_url
from delaytasks.core.errors import ConfigError
from delaytasks.core.masking import Secret
from delaytasks.core.task import DelayTask
from delaytasks.processors.event_loop import result_of
from delaytasks.storage.types import db_now
from delaytasks.wiring import Wiring


class DjangoDelays(DelayTasks):
    """Delayed tasks whose rows are written on a connection of Django's."""

    def __init__(self, celery_app: Any, alias: str = "default", **options: Any) -> None:
        if not isinstance(alias, str):
            raise ConfigError(
                f"settings.DELAYTASKS['database'] = {alias!r} is not one alias of settings.DATABASES; several "
                "databases need a DelayTasks of your own"
            )
        if alias not in connections.settings:
            known = ", ".join(map(repr, connections.settings))
            raise ConfigError(
                f"settings.DELAYTASKS['database'] = {alias!r} is not in settings.DATABASES ({known})"
            )
        self.alias = alias
        self._database: Any = None
        super().__init__(celery_app, **options)
        self.ambient_transaction = self._unit_of_django
        self.around.append(self._closed_after)

    def _unit_of_django(self) -> DjangoTransaction:
        return DjangoTransaction(self.alias)

    @contextmanager
    def _closed_after(self, task: DelayTask) -> Iterator[None]:
        """Django's async calls have their connections in a thread of asgiref's, which Celery's signals do not reach."""
        try:
            yield
        finally:
            processor = self.registry.get(task.tag)
            if processor is not None and iscoroutinefunction(processor.function):
                result_of(sync_to_async(close_old_connections)())

    @property
    def _made(self) -> Wiring:
        """Django's test runner gives the database another name, and back: we go where it goes."""
        name = connections.settings[self.alias]["NAME"]
        if self._parts is None or name != self._database:
            with self._lock:
                if self._parts is not None and name != self._database:
                    self.close()
                    self._parts = None
                connection = connections[self.alias]
                self._arguments["database_url"] = Secret(
                    database_url(connection.vendor, connection.settings_dict)
                )
                self._database = name
        return super()._made

    def import_processors(self) -> None:
        """`delays.py` of every installed app, and what installed packages bring."""
        autodiscover_modules("delays")
        self._import_entry_points()  # Celery's signal for it is being sent already when a worker sets Django up

    def database_now(self, insists: bool) -> datetime:
        """Asked on Django's connection. One of our own would stay open, and Django's test runner could not drop
        its database then. A worker has connections of its own anyway, and threads in which nobody closes Django's."""
        if self.processes.is_worker:
            return super().database_now(insists)
        try:
            now: datetime = (
                DjangoExecutor(connections[self.alias]).peek(select(db_now())).scalar_one()
            )
        except Error:
            with DjangoTransaction(
                self.alias
            ).guard():  # which says what that means for the caller's transaction
                raise
        return now


@lru_cache(maxsize=1)
def project_delays() -> DjangoDelays:
    """Made once, whoever asks first."""
    options = getattr(settings, "DELAYTASKS", {})
    if not isinstance(options, dict):
        raise ConfigError(
            f"settings.DELAYTASKS is a dict of settings, not {type(options).__name__}"
        )
    options = dict(options)
    if "database_url" in options:
        raise ConfigError(
            "settings.DELAYTASKS has 'database_url', but rows are written on a connection of Django's: name an alias "
            "of settings.DATABASES as 'database' instead"
        )
    path, alias = options.pop("celery_app", None), options.pop("database", "default")
    delays = DjangoDelays(_celery_app(path), alias, **options)
    try:
        _ = delays.settings
    except ConfigError as error:
        raise ConfigError(f"{error} (see settings.DELAYTASKS)") from None
    return delays


def _celery_app(path: str | None) -> Any:
    """The app that is named; else the project's, which is the current one; else one that Django's settings make."""
    if path is not None:
        found = import_string(path.replace(":", "."))
        if not isinstance(found, Celery):
            raise ConfigError(
                f"settings.DELAYTASKS['celery_app'] = {path!r} is a {type(found).__name__}, not a Celery app"
            )
        return found
    current = _state._tls.current_app or _state.default_app
    if current is not None:
        return current
    made = Celery(
        str(settings.ROOT_URLCONF).partition(".")[0] if settings.ROOT_URLCONF else "django"
    )
    made.config_from_object("django.conf:settings", namespace="CELERY")
    made.autodiscover_tasks()
    return made
