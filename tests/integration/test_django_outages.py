"""Test the errors that a Django project's callers and command line get without a database."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from delaytasks.runtime import runtime_of

pytest.importorskip("django")

from django.db import DatabaseError, connections, transaction

from delaytasks import SessionUnusableError, StoreUnavailableError
from delaytasks.contrib.django.instance import DjangoDelays
from tests.conformance.test_outages import READ_ONLY
from tests.integration import django_settings
from tests.integration.cli.project import Project
from tests.proxy import proxy_to
from tests.services import free_port


@pytest.fixture(scope="module", autouse=True)
def django() -> Iterator[None]:
    with django_settings.configured():
        yield


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


CALLS: dict[str, Callable[[DjangoDelays], Any]] = {
    "schedule_delay": lambda d: d.schedule_delay("mail", {}, 5),
    "schedule_delay with a key": lambda d: d.schedule_delay("mail", {}, 5, key="k"),
    "schedule_many": lambda d: d.schedule_many([("mail", {}, 5)]),
    "cancel": lambda d: d.cancel(7),
    "cancel by key": lambda d: d.cancel(tag="mail", key="k"),
    "reschedule": lambda d: d.reschedule(7, 5),
    "touch": lambda d: d.touch(7, 5),
    "touch several": lambda d: d.touch([7], 5),
    "rerun": lambda d: d.rerun(7),
    "get": lambda d: d.get(7),
    "get by key": lambda d: d.get(tag="mail", key="k"),
    "attempts": lambda d: d.get(7, attempts=True),
    "find": lambda d: d.find(tag="mail").tasks,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_outside_of_atomic_reports_that_the_database_is_unavailable(
    away: DjangoDelays, name: str
) -> None:
    for _ in range(2):
        message = f"database '{away.alias}' cannot be used: "
        with pytest.raises(StoreUnavailableError, match=message) as caught:
            CALLS[name](away)
        assert "atomic" not in str(caught.value)


def test_the_command_line_reports_that_the_database_is_unavailable(
    away: DjangoDelays, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("project_that_is_away")
    module.app = runtime_of(away).celery  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    project = Project(module.__name__)
    for command in ("list", "show 7", "cancel 7", "schedule mail {} --delay 5"):
        error = project.error(*command.split(), exit_code=1)
        assert error["type"] == "StoreUnavailableError", command


@contextmanager
def on_database(url: str, alias: str) -> Iterator[DjangoDelays]:
    """Return an instance with tables of its own."""
    django_settings.add_database(alias, url)
    delays = DjangoDelays(django_settings.new_celery_app(), alias, table_prefix=f"{alias}_")
    store = runtime_of(delays).store
    try:
        store.schema.metadata.create_all(store.database.tx)
        yield delays
        store.schema.metadata.drop_all(store.database.tx)
    finally:
        delays.close()
        django_settings.remove_database(alias)


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_a_database_lost_between_two_calls_is_reported_and_used_again_later(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    proxy = proxy_to(url)
    with closing(proxy), on_database(proxy.url(url), f"leaves_{kind}") as delays:
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
    with on_database(request.getfixturevalue(f"{kind}_url"), f"demoted_{kind}") as delays:
        with connections[delays.alias].cursor() as cursor:
            cursor.execute(READ_ONLY[kind])
        with pytest.raises(StoreUnavailableError, match=r"(?i)read.only transaction"):
            delays.schedule_delay("mail", {}, 60)
        delays.schedule_delay("mail", {}, 60)
        assert len(delays.find(tag="mail").tasks) == 1
