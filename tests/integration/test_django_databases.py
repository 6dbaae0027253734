"""Test how the database and the options are taken from Django's settings."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import psycopg
import pytest

from delaytasks.runtime import runtime_of
from delaytasks.testing import create_tables

pytest.importorskip("django")

from django.db import connections, transaction
from django.test.utils import override_settings

from delaytasks import ConfigError
from delaytasks.contrib.django.connection import database_url as url_of
from delaytasks.contrib.django.instance import DjangoDelays, project_delays
from tests.integration import django_settings
from tests.integration.test_django import django  # noqa: F401


@pytest.mark.parametrize(
    ("vendor", "settings", "url"),
    [
        (
            "postgresql",
            {"NAME": "shop", "USER": "me", "PASSWORD": "p@ss:/%", "HOST": "db", "PORT": "5433"},
            "postgresql+psycopg2://me:p%40ss%3A%2F%25@db:5433/shop",
        ),
        ("postgresql", {"NAME": "shop"}, "postgresql+psycopg2:///shop"),
        (
            "postgresql",
            {"NAME": "shop", "HOST": "/var/run/postgresql", "PORT": 5433},
            "postgresql+psycopg2:///shop?host=%2Fvar%2Frun%2Fpostgresql&port=5433",
        ),
        (
            "postgresql",
            {
                "NAME": "shop",
                "HOST": "db",
                "OPTIONS": {"sslmode": "require", "pool": True, "isolation_level": 3},
            },
            "postgresql+psycopg2://db/shop?sslmode=require",
        ),
        (
            "postgresql",
            {
                "NAME": "shop",
                "HOST": "db",
                "OPTIONS": {"options": "-c search_path=a", "assume_role": "b"},
            },
            "postgresql+psycopg2://db/shop?options=-c+search_path%3Da+-c+role%3Db",
        ),
        (
            "postgresql",
            {"NAME": "", "OPTIONS": {"service": "shop"}},
            "postgresql+psycopg2://?service=shop",
        ),
        (
            "mysql",
            {
                "NAME": "shop",
                "USER": "me",
                "PASSWORD": "p w",
                "HOST": "db",
                "PORT": 3307,
                "OPTIONS": {"charset": "x"},
            },
            "mysql+pymysql://me:p w@db:3307/shop",
        ),
        (
            "mysql",
            {"NAME": "shop", "HOST": "/run/mysqld.sock"},
            "mysql+pymysql://localhost/shop?unix_socket=%2Frun%2Fmysqld.sock",
        ),
        (
            "mysql",
            {
                "NAME": "shop",
                "HOST": "db",
                "OPTIONS": {"ssl_mode": "VERIFY_CA", "ssl": {"ca": "/ca.pem"}},
            },
            "mysql+pymysql://db/shop?ssl_ca=%2Fca.pem&ssl_check_hostname=false",
        ),
        ("sqlite", {"NAME": "/srv/shop.sqlite3"}, "sqlite:////srv/shop.sqlite3"),
        (
            "sqlite",
            {"NAME": "file:memorydb_default?mode=memory&cache=shared"},
            "sqlite:///file%3Amemorydb_default?cache=shared&mode=memory&uri=true",
        ),
    ],
)
def test_the_url_has_the_values_of_djangos_settings(
    vendor: str, settings: dict[str, Any], url: str
) -> None:
    # SQLAlchemy 2.0 quotes fewer characters.
    assert unquote(url_of(vendor, settings)) == unquote(url)


def test_a_database_that_is_not_supported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"oracle.*DELAYTASKS\['database'\]"):
        url_of("oracle", {"NAME": "shop"})


def test_the_instance_uses_the_database_of_the_test_runner(tmp_path: Any) -> None:
    django_settings.add_database("moving", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    try:
        delays = DjangoDelays(django_settings.new_celery_app(), "moving")
        before = runtime_of(delays).store
        assert runtime_of(delays).store is before
        connections.settings["moving"]["NAME"] = str(tmp_path / "test_shop.sqlite3")
        assert str(runtime_of(delays).store.database.url.database) == str(
            tmp_path / "test_shop.sqlite3"
        )
        assert runtime_of(delays).store is runtime_of(delays).store is not before
        delays.close()
    finally:
        django_settings.remove_database("moving")


def test_tasks_are_written_with_psycopg_3_which_django_prefers(postgresql_url: str) -> None:
    django_settings.add_database("modern", postgresql_url)
    delays = DjangoDelays(django_settings.new_celery_app(), "modern", table_prefix="psycopg3_")
    store = runtime_of(delays).store
    with store.database.begin() as own:
        create_tables(own, delays)
    try:
        with transaction.atomic("modern"), connections["modern"].cursor() as cursor:
            task = delays.schedule_delay("order.close", {"order": 7}, 60)
            assert isinstance(connections["modern"].connection, psycopg.Connection)
            cursor.execute(f"SELECT id FROM {store.schema.tasks.name}")
            assert cursor.fetchall() == [(task.id,)]
            assert delays.get(task).body == {"order": 7}
    finally:
        store.schema.metadata.drop_all(store.database.tx)
        delays.close()
        django_settings.remove_database("modern")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon_s": 30}, "did you mean delaytasks_horizon"),
        ({"horizon": -1}, "delaytasks_horizon = -1"),
        ({"database": "orders"}, r"'orders' is not in settings.DATABASES \('default'"),
        ({"database": ["default", "orders"]}, "not one alias .* several databases need"),
        ({"database_url": "sqlite://"}, "name an alias"),
        ({"celery_app": "delaytasks.client.DelayTasks"}, "not a Celery app"),
        ([("horizon", 30)], "is a dict"),
    ],
)
def test_a_wrong_setting_is_reported_at_the_start(
    options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(options, dict):
        monkeypatch.setattr(django_settings, "celery_app", django_settings.new_celery_app())
        options = {"celery_app": f"{django_settings.__name__}.celery_app", **options}
    with override_settings(DELAYTASKS=options), pytest.raises(ConfigError, match=message):
        project_delays.__wrapped__()
