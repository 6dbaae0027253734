"""Configure Django inside the test process.

The settings are configured once and by hand, so that Celery finds no environment variable that
names a Django settings module.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from celery import Celery

from delaytasks import celery as current
from tests.django_site import database_entry, replace_mysqlclient
from tests.world.recording import make_tables

if TYPE_CHECKING:
    from delaytasks.contrib.django.instance import DjangoDelays


def new_celery_app() -> Celery:
    """Return an app that is not Celery's current app, since other tests have apps of their own."""
    made = Celery("django_tests", set_as_current=False)
    made.conf.broker_url = "memory://"
    return made


BACKEND = "delaytasks.contrib.django.tasks_backend.DelayTasksBackend"


def _framework() -> str:
    """Return the package of the Tasks framework. Only the tests of our backend use it."""
    return "django_tasks" if importlib.util.find_spec("django.tasks") is None else "django.tasks"


#: The Celery app of the project that these settings configure.
celery_app = new_celery_app()


@contextmanager
def configured() -> Iterator[None]:
    """Make Django's instance the default of the module-level functions while the context is open.

    Django itself can be set up only once in a process.
    """
    from django.conf import settings

    before = current._of_project
    if not settings.configured:
        _set_up()
    from delaytasks.contrib.django.instance import project_delays

    current.set_project_delays(project_delays())
    yield
    current.set_project_delays(before)


def _set_up() -> None:
    import django
    from django.conf import settings

    replace_mysqlclient()
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=["delaytasks.contrib.django"],
        DELAYTASKS={"celery_app": f"{__name__}.celery_app"},
        TASKS={
            "default": {"BACKEND": BACKEND, "QUEUES": []},
            "patient": {"BACKEND": BACKEND, "OPTIONS": {"retries": "1m 1m"}},
            "other": {"BACKEND": f"{_framework()}.backends.dummy.DummyBackend"},
        },
        USE_TZ=True,
        SECRET_KEY="a secret of the tests",
    )
    django.setup()


@contextmanager
def instance_on(url: str, alias: str) -> Iterator[DjangoDelays]:
    """Make an instance with tables of its own on a database that is added for it."""
    from delaytasks.contrib.django.instance import DjangoDelays

    add_database(alias, url)
    delays = DjangoDelays(new_celery_app(), alias, table_prefix=f"{alias}_")
    try:
        store = make_tables(delays)
        yield delays
        store.schema.metadata.drop_all(store.database.tx)
    finally:
        delays.close()
        remove_database(alias)


def add_database(alias: str, url: str) -> None:
    """Add an entry to the setting DATABASES."""
    from django.db import connections

    connections.settings[alias] = connections.configure_settings(
        {"default": {}, alias: database_entry(url)}
    )[alias]


def remove_database(alias: str) -> None:
    from django.db import connections

    connections[alias].close()
    del connections[alias], connections.settings[alias]
