"""Test requests of a Django project: its transactions, connections and several databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks.runtime import runtime_of

pytest.importorskip("django")

from django.core import signals
from django.core.management import call_command
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.test.utils import override_settings
from django.urls import path

from delaytasks.contrib.django.instance import DjangoDelays
from delaytasks.core.interfaces import Entry
from tests.integration import django_settings
from tests.integration.test_django import alias, armed, delays, django, module_delays  # noqa: F401


class OneDatabase:
    """A router that lets only one database have tables."""

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool:
        return db == "orders"


@pytest.mark.parametrize("fails", [True, False])
def test_with_atomic_requests_a_task_is_part_of_the_request(
    delays: DjangoDelays,  # noqa: F811
    armed: list[Entry],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    during = list[int]()

    def view(request: HttpRequest) -> HttpResponse:
        delays.schedule_delay("order.close", {}, 1)
        during.append(len(armed))
        if fails:
            raise ValueError("the view fails")
        return HttpResponse()

    monkeypatch.setitem(connections.settings[delays.alias], "ATOMIC_REQUESTS", True)
    urls = type("urls", (), {"urlpatterns": [path("order", view)]})
    with override_settings(ROOT_URLCONF=urls, ALLOWED_HOSTS=["*"]):
        status = Client(raise_request_exception=False).get("/order").status_code
    assert status == (500 if fails else 200)
    assert during == [0]
    assert len(armed) == len(delays.find()) == (0 if fails else 1)


@pytest.mark.parametrize("max_age_s", [0, 60, None])
def test_calls_work_with_any_conn_max_age(
    delays: DjangoDelays,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    max_age_s: float | None,
) -> None:
    connection = connections[delays.alias]
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age_s)
    connection.close()
    for number in range(3):
        signals.request_started.send(None)
        delays.schedule_delay("order.close", number, 60)
        signals.request_finished.send(None)
        assert (connection.connection is None) is (max_age_s == 0)
    assert [task.body for task in delays.find()] == [0, 1, 2]


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DjangoDelays]:
    """Return an instance on the second of two databases, both without tables."""
    for name in ("orders", "archive"):
        django_settings.add_database(name, f"sqlite:///{tmp_path / name}.sqlite3")
    made = DjangoDelays(django_settings.new_celery_app(), "orders")
    from delaytasks.contrib.django import checks as tables
    from delaytasks.contrib.django import models

    for module in (tables, models):
        monkeypatch.setattr(module, "project_delays", lambda: made)
    yield made
    made.close()
    for name in ("orders", "archive"):
        django_settings.remove_database(name)


@pytest.mark.parametrize("routers", [[], [f"{__name__}.OneDatabase"]])
def test_only_the_configured_database_gets_the_tables_and_the_model_reads_it(
    orders: DjangoDelays, routers: list[str]
) -> None:
    with override_settings(DATABASE_ROUTERS=routers):
        for name in ("orders", "archive"):
            call_command("migrate", database=name, verbosity=0)
        task = orders.schedule_delay("order.close", {"order": 7}, 60)
        from delaytasks.contrib.django.models import DelayTaskRow

        assert [row.id for row in DelayTaskRow.objects.all()] == [task.id]
    table = runtime_of(orders).store.schema.tasks.name
    assert table in connections["orders"].introspection.table_names()
    assert table not in connections["archive"].introspection.table_names()
