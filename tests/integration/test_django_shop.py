"""Test the Django example: its migrations on each database, its own tests, and a real worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from tests.integration.shops import ExampleShop, fresh_database
from tests.migration.test_migrations import schema_differences
from tests.running import output_of

pytestmark = pytest.mark.slow

pytest.importorskip("django")


@pytest.fixture
def fresh_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Create a database that only this test uses."""
    yield from fresh_database(request.param, request, tmp_path)


databases = pytest.mark.parametrize("fresh_url", ["postgresql", "mysql", "sqlite"], indirect=True)


@pytest.fixture
def shop(fresh_url: str) -> Iterator[ExampleShop]:
    """Return a shop whose database is empty."""
    shop = ExampleShop("django_shop", fresh_url)
    yield shop
    shop.close()


# -- migrations -----------------------------------------------------------------------------------


@databases
def test_migrate_makes_and_finds_the_metadatas_tables_as_alembic_does(shop: ExampleShop) -> None:
    database = runtime_of(shop.delays).store.database
    shop.command("manage.py", "migrate")
    assert schema_differences(database, "", None) == []
    assert migrations.current(database) == migrations.head()
    wanted = shop.command("manage.py", "makemigrations", "--check", "--dry-run")
    assert "No changes detected" in wanted, "Django's models need no other migration"
    shop.command("manage.py", "migrate", "delaytasks", "zero")
    assert migrations.current(database) is None
    migrations.upgrade(database)
    task = shop.delays.schedule_delay("order.close", {"order": 7}, 3600)
    shop.command("manage.py", "migrate")
    assert shop.delays.get(task).body == {"order": 7}
    assert schema_differences(database, "", None) == []

    # The reverse migration keeps a task table that has rows.
    shop.command("manage.py", "migrate", "delaytasks", "zero")
    with database.begin() as connection:
        query = text("SELECT tag FROM yb_delay_task_message")
        assert connection.execute(query).scalar() == "order.close"
    shop.command("manage.py", "migrate")
    assert shop.delays.get(task).body == {"order": 7}
    assert migrations.current(database) == migrations.head()


# -- the project ----------------------------------------------------------------------------------


@databases
def test_the_shops_own_tests_pass_in_djangos_test_databases(shop: ExampleShop) -> None:
    """Django creates, fills, copies and drops the test databases.

    Copying and dropping a database require that no other connection to it is open.
    """
    assert "OK" in shop.command("manage.py", "test")
    assert "OK" in shop.command("manage.py", "test", "--parallel", "2")
    assert "OK" in shop.command("manage.py", "test", "tests.integration.django_kit_tests")


# -- Test Django's admin on each database ---------------------------------------------------------


@databases
def test_the_tests_of_the_admin_pass(fresh_url: str) -> None:
    # The plugin of pytest-django would refuse to use a database.
    plugins = "no:django no:xdist no:cacheprovider tests.integration.django_admin_settings".split()
    options = [option for plugin in plugins for option in ("-p", plugin)]
    tests = "tests/integration/django_admin_tests.py"
    command = [sys.executable, "-m", "pytest", "-q", *options, tests]
    output_of(command, env={**os.environ, "ADMIN_DATABASE_URL": fresh_url})
