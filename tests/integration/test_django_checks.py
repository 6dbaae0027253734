"""Test Django's system checks, and the error for a model instance in place of its pk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks.runtime import runtime_of

pytest.importorskip("django")

from django.core.checks import run_checks
from django.db import connections
from sqlalchemy import text

from delaytasks.contrib.django import checks
from delaytasks.contrib.django.instance import DjangoDelays
from delaytasks.storage import migrations
from delaytasks.storage import state_queries as live_tags
from tests.integration import django_settings
from tests.integration.test_django import alias, django  # noqa: F401
from tests.refusals import invalid

MakeProject = Callable[..., DjangoDelays]


@pytest.fixture
def make_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeProject]:
    """Return a function that makes the project's instance, on an SQLite file without tables."""
    made: list[DjangoDelays] = []

    def make(
        broker_url: str | None = "memory://", database: str = "checked", **settings: Any
    ) -> DjangoDelays:
        app = django_settings.new_celery_app()
        app.conf.broker_url = broker_url
        made.append(DjangoDelays(app, database, **settings))
        monkeypatch.setattr(checks, "project_delays", lambda: made[-1])
        return made[-1]

    django_settings.add_database("checked", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    yield make
    for delays in made:
        delays.close()
    django_settings.remove_database("checked")


def found(**options: Any) -> dict[str, str]:
    """Return the messages and hints of our checks by their ids, as `manage.py check` finds them."""
    messages = run_checks(tags=["delaytasks"], **options)
    assert all(message.hint for message in messages)
    return {
        message.id.removeprefix("delaytasks."): f"{message.msg} {message.hint}"
        for message in messages
    }


def test_a_usual_project_has_no_problem(make_project: MakeProject) -> None:
    migrations.upgrade(runtime_of(make_project()).store.database)
    assert found(databases=["checked"]) == {}


def test_a_horizon_above_the_brokers_timeout_is_an_error(make_project: MakeProject) -> None:
    delays = make_project(horizon=30)
    runtime_of(delays).celery.conf.broker_transport_options = {"visibility_timeout": 20}
    assert list(found()) == ["E001"]
    assert "lower the horizon" in found()["E001"]


def test_a_project_without_a_broker_is_warned_unless_it_needs_none(
    make_project: MakeProject,
) -> None:
    make_project(None)
    assert "CELERY_BROKER_URL" in found()["W001"]
    make_project(None, timer="direct")
    assert found() == {}


def test_sqlite_is_reported_before_a_deployment(make_project: MakeProject) -> None:
    make_project()
    assert list(found(include_deployment_checks=True)) == ["W002"]


def test_a_database_that_is_too_old_is_an_error(
    make_project: MakeProject,
    alias: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_project(database=alias)
    assert "E002" not in found(databases=[alias])
    for name in checks.OLDEST_VERSIONS:
        monkeypatch.setitem(checks.OLDEST_VERSIONS, name, (99, 1))
    message = found(databases=[alias]).get("E002")
    vendor = connections[alias].vendor
    if vendor == "postgresql":  # Django itself refuses an old PostgreSQL
        assert message is None
    else:
        servers = {"sqlite": "SQLite", "mysql": "(MariaDB|MySQL)"}
        assert message is not None
        assert re.search(rf" is {servers[vendor]} \d+\.\d+.* requires 99\.1", message)
    assert found(databases=["default"]) == {}


def test_tables_that_are_missing_or_of_another_version_are_reported(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = runtime_of(make_project()).store.database
    assert "manage.py migrate" in found(databases=["checked"])["W003"]
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["manage.py", "migrate"])
        assert "W003" not in found(databases=["checked"]), "this command makes them"
    migrations.upgrade(database)
    for revision, remedy in (("0000", "manage.py migrate"), ("9999", "or a newer one")):
        with database.begin() as connection:
            table = migrations.version_table("")
            connection.execute(text(f"UPDATE {table} SET version_num = '{revision}'"))
        message = found(databases=["checked"])["W003"]
        assert revision in message
        assert remedy in message


def test_waiting_tasks_whose_tag_has_no_processor_are_reported(make_project: MakeProject) -> None:
    delays = make_project(tags="any")
    migrations.upgrade(runtime_of(delays).store.database)
    delays.processor("known")(lambda body: None)
    for tag in ("known", "removed", "removed"):
        delays.schedule_delay(tag, {}, 60)
    message = found(databases=["checked"])["W004"]
    assert "'removed' (2)" in message
    assert "'known'" not in message


def test_a_large_number_of_waiting_tasks_is_not_read_as_a_whole(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = make_project(tags="any")
    migrations.upgrade(runtime_of(delays).store.database)
    monkeypatch.setattr(live_tags, "MOST_TAG_ROWS", 2)
    for queue, tag in (("a", "removed"), ("a", "removed"), ("a", "removed"), ("b", "renamed")):
        delays.schedule_delay(tag, {}, 60, queue=queue)
    message = found(databases=["checked"])["W004"]
    assert "'removed' (at least 2), 'renamed' (at least 1)" in message


def test_a_model_instance_is_refused_and_the_error_says_to_pass_its_pk(
    make_project: MakeProject,
) -> None:
    from delaytasks.contrib.django.models import DelayTaskRow

    delays, order = make_project(), DelayTaskRow(id=7)
    migrations.upgrade(runtime_of(delays).store.database)

    @delays.processor("order.close")
    def close_order(body: Any) -> None: ...

    with invalid("body", match=r"\$\.order: DelayTaskRow .*pass its pk"):
        close_order.schedule({"order": order}, 60)
    with invalid("key", match=r"not DelayTaskRow; .*pass its pk"):
        close_order.schedule({}, 60, key=order)
    with invalid("key", match="pass its pk"):
        close_order.cancel(key=order)
