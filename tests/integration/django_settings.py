"""Django inside the test process: configured once, by hand, so that no environment variable tells Celery of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from sqlalchemy import make_url

from delaytasks import api


def new_celery_app() -> Celery:
    """Not the current app: other tests have apps of their own."""
    made = Celery("django_tests", set_as_current=False)
    made.conf.broker_url = "memory://"
    return made


#: The app of the project that these settings make.
celery_app = new_celery_app()


@contextmanager
def configured() -> Iterator[None]:
    """The module-level functions are Django's while it lasts. Django itself can be set up only once."""
    from django.conf import settings

    before = api._default
    if not settings.configured:
        _set_up()
    from delaytasks.contrib.django.instance import project_delays

    api.set_default(project_delays())
    yield
    api.set_default(before)


def _set_up() -> None:
    import django
    from django.conf import settings

    if importlib.util.find_spec("MySQLdb") is None:
        import pymysql

        pymysql.install_as_MySQLdb()
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=["delaytasks.contrib.django"],
        DELAYTASKS={"celery_app": f"{__name__}.celery_app"},
        USE_TZ=True,
    )
    django.setup()


def add_database(alias: str, url: str) -> None:
    """One more entry of DATABASES."""
    from django.db import connections

    place = make_url(url)
    engine = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}[
        place.get_backend_name()
    ]
    options = {
        "sqlite3": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        "mysql": {"charset": "utf8mb4"},
    }
    entry: dict[str, Any] = {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": place.database,
        "USER": place.username or "",
        "PASSWORD": place.password or "",
        "HOST": place.host or "",
        "PORT": place.port or "",
        "OPTIONS": options.get(engine, {}),
    }
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: entry})[
        alias
    ]


def remove_database(alias: str) -> None:
    from django.db import connections

    connections[alias].close()
    del connections[alias], connections.settings[alias]
