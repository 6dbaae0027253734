"""Test a Django project's database settings, and its errors while a database is away."""

# ruff: noqa: F811 - parameters have the names of imported fixtures

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("django")

import psycopg
from django.db import DatabaseError, connections, transaction
from django.test.utils import override_settings

from delaytasks import ConfigError, SessionUnusableError, StoreUnavailableError
from delaytasks.contrib.django.django_connection import database_url as url_of
from delaytasks.contrib.django.instance import DjangoDelays, project_delays
from delaytasks.runtime import runtime_of
from tests.conformance.test_outages import READ_ONLY
from tests.integration import django_settings
from tests.integration.cli.project import Project
from tests.integration.django_settings import instance_on
from tests.integration.test_django import alias, django  # noqa: F401
from tests.proxy import proxy_to
from tests.services import free_port

SHOP = {"NAME": "shop", "HOST": "db"}


@pytest.mark.parametrize(
    ("vendor", "settings", "url"),
    [
        ("postgresql", {**SHOP, "USER": "me", "PASSWORD": "p@ss:/%", "PORT": "5433"},
         "+psycopg2://me:p%40ss%3A%2F%25@db:5433/shop"),
        ("postgresql", {"NAME": "shop"}, "+psycopg2:///shop"),
        ("postgresql", {"NAME": "shop", "HOST": "/var/run/postgresql", "PORT": 5433},
         "+psycopg2:///shop?host=%2Fvar%2Frun%2Fpostgresql&port=5433"),
        ("postgresql",
         {**SHOP, "OPTIONS": {"sslmode": "require", "pool": True, "isolation_level": 3}},
         "+psycopg2://db/shop?sslmode=require"),
        ("postgresql", {**SHOP, "OPTIONS": {"options": "-c search_path=a", "assume_role": "b"}},
         "+psycopg2://db/shop?options=-c+search_path%3Da+-c+role%3Db"),
        ("postgresql", {"NAME": "", "OPTIONS": {"service": "shop"}}, "+psycopg2://?service=shop"),
        ("mysql",
         {**SHOP, "USER": "me", "PASSWORD": "p w", "PORT": 3307, "OPTIONS": {"charset": "x"}},
         "+pymysql://me:p w@db:3307/shop"),
        ("mysql", {"NAME": "shop", "HOST": "/run/mysqld.sock"},
         "+pymysql://localhost/shop?unix_socket=%2Frun%2Fmysqld.sock"),
        ("mysql", {**SHOP, "OPTIONS": {"ssl_mode": "VERIFY_CA", "ssl": {"ca": "/ca.pem"}}},
         "+pymysql://db/shop?ssl_ca=%2Fca.pem&ssl_check_hostname=false"),
        ("sqlite", {"NAME": "/srv/shop.sqlite3"}, ":////srv/shop.sqlite3"),
        ("sqlite", {"NAME": "file:memorydb_default?mode=memory&cache=shared"},
         ":///file:memorydb_default?mode=memory&cache=shared&uri=true"),
    ],
)  # fmt: skip
def test_the_url_has_djangos_settings(vendor: str, settings: dict[str, Any], url: str) -> None:
    # SQLAlchemy 2.0 quotes fewer characters.
    assert unquote(url_of(vendor, settings)) == unquote(vendor + url)
    with pytest.raises(ConfigError, match=r"oracle.*DELAYTASKS\['database'\]"):
        url_of("oracle", settings)


def test_tasks_are_written_with_psycopg_3_which_django_prefers(postgresql_url: str) -> None:
    with (
        django_settings.instance_on(postgresql_url, "modern") as delays,
        transaction.atomic("modern"),
        connections["modern"].cursor() as cursor,
    ):
        task = delays.schedule_delay("order.close", {"order": 7}, 60)
        assert isinstance(connections["modern"].connection, psycopg.Connection)
        cursor.execute(f"SELECT id FROM {runtime_of(delays).store.schema.tasks.name}")
        assert cursor.fetchall() == [(task.id,)]
        assert delays.get(task).body == {"order": 7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon_s": 30}, "did you mean horizon"),
        ({"horizon": -1}, "delaytasks_horizon = -1"),
        ({"database": "orders"}, r"'orders' is not one alias of settings.DATABASES \('default'"),
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


# -- Errors of calls and commands without a database ----------------------------------------------


@pytest.fixture(params=["postgresql", "mysql", "sqlite"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DjangoDelays]:
    """Return an instance whose database has never been reachable."""
    kind = request.param
    place = f"//root@127.0.0.1:{free_port()}/shop"
    file = f"sqlite:///{tmp_path}/no/such/folder/shop.sqlite3"
    url = file if kind == "sqlite" else f"{kind}:{place}"
    alias = f"away_{kind}"
    django_settings.add_database(alias, url)
    delays = DjangoDelays(django_settings.new_celery_app(), alias)
    yield delays
    delays.close()
    django_settings.remove_database(alias)


CALLS: list[Callable[[DjangoDelays], Any]] = [
    lambda d: d.schedule_delay("mail", {}, 5),
    lambda d: d.schedule_delay("mail", {}, 5, key="k"),
    lambda d: d.schedule_many([("mail", {}, 5)]),
    lambda d: d.cancel(7),
    lambda d: d.cancel(tag="mail", key="k"),
    lambda d: d.reschedule(7, 5),
    lambda d: d.touch(7, 5),
    lambda d: d.touch([7], 5),
    lambda d: d.rerun(7),
    lambda d: d.get(7),
    lambda d: d.get(tag="mail", key="k"),
    lambda d: d.get(7, attempts=True),
    lambda d: d.find(tag="mail").tasks,
]


def test_calls_and_commands_outside_of_atomic_report_that_the_database_is_unavailable(
    away: DjangoDelays, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in CALLS * 2:
        with pytest.raises(StoreUnavailableError, match="cannot be reached: ") as caught:
            call(away)
        assert "atomic" not in str(caught.value)
    module = ModuleType("project_that_is_away")
    module.app = runtime_of(away).celery  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    project = Project(module.__name__, monkeypatch)
    for words in ("list", "show 7", "cancel 7", "schedule mail {} --delay 5"):
        error = project.error(*words.split(), exit_code=1)
        assert error["type"] == "StoreUnavailableError", words


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_a_database_lost_between_two_calls_is_reported_and_used_again_later(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    proxy = proxy_to(url)
    with closing(proxy), instance_on(proxy.url(url), f"leaves_{kind}") as delays:
        task = delays.schedule_delay("mail", {}, 60, key="k")
        # The call must read the database's time inside its own transaction.
        monkeypatch.setattr(runtime_of(delays).clock, "_base", None)
        proxy.reset()
        with pytest.raises(StoreUnavailableError):
            delays.reschedule(task, 5)
        proxy.refuse()
        for call in (
            lambda: delays.reschedule(task, 5),
            lambda: delays.cancel(task),
            lambda: delays.get(task),
        ):
            with pytest.raises(StoreUnavailableError):
                call()
        with pytest.raises((SessionUnusableError, DatabaseError)), transaction.atomic(delays.alias):
            delays.get(task)
        proxy.heal()
        assert delays.cancel(task)


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_a_connection_to_a_former_primary_is_closed_after_one_call(
    kind: str, request: pytest.FixtureRequest
) -> None:
    with instance_on(request.getfixturevalue(f"{kind}_url"), f"demoted_{kind}") as delays:
        with connections[delays.alias].cursor() as cursor:
            cursor.execute(READ_ONLY[kind])
        with pytest.raises(StoreUnavailableError, match=r"(?i)read.only transaction"):
            delays.schedule_delay("mail", {}, 60)
        delays.schedule_delay("mail", {}, 60)
        assert len(delays.find(tag="mail").tasks) == 1
