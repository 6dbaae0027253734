"""Test the Django example: its migrations on each database, its own tests, and a real worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations
from tests.integration.shops import ExampleShop, fresh_database
from tests.migration.test_migrations import schema_differences
from tests.running import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("django")


@pytest.fixture
def fresh_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Create a database that only this test uses."""
    yield from fresh_database(request.param, request, tmp_path)


each_database = pytest.mark.parametrize(
    "fresh_url", ["postgresql", "mysql", "sqlite"], indirect=True
)


@pytest.fixture
def shop(fresh_url: str, redis_url: str, tmp_path: Path) -> Iterator[ExampleShop]:
    """Return a shop whose database is empty and whose processes are not started."""
    shop = ExampleShop("django_shop", tmp_path, fresh_url, redis_url)
    yield shop
    shop.close()


def create_statements(url: str) -> dict[str, str]:
    """Return the database's own definition of each table and index of delaytasks."""
    engine = create_engine(url)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            query = (
                "SELECT name, sql FROM sqlite_master "
                "WHERE tbl_name LIKE 'yb_delay%' AND sql IS NOT NULL"
            )
        elif engine.dialect.name == "postgresql":
            query = """
                SELECT table_name || '.' || column_name,
                  concat_ws(' ', data_type, is_nullable, column_default, \
character_maximum_length, is_identity)
                  FROM information_schema.columns WHERE table_name LIKE 'yb_delay%'
                UNION ALL SELECT indexname, indexdef FROM pg_indexes \
WHERE tablename LIKE 'yb_delay%'
                UNION ALL SELECT relname, reloptions::text FROM pg_class
                  WHERE relname LIKE 'yb_delay%' AND reloptions IS NOT NULL"""
        else:
            names = [row[0] for row in connection.execute(text("SHOW TABLES LIKE 'yb_delay%'"))]
            return {
                name: str(connection.execute(text(f"SHOW CREATE TABLE {name}")).one()[1])
                for name in names
            }
        found = {
            str(name): " ".join(str(sql).split()) for name, sql in connection.execute(text(query))
        }
    engine.dispose()
    return found


# -- migrations -----------------------------------------------------------------------------------


@each_database
def test_migrate_makes_and_finds_the_tables_of_the_metadata_as_alembic_does(
    shop: ExampleShop,
) -> None:
    database = runtime_of(shop.delays).store.database
    shop.command("manage.py", "migrate")
    assert schema_differences(database, "", None) == []
    assert migrations.current(database) == migrations.head()
    by_django = create_statements(shop.database_url)
    assert len(by_django) >= 5

    shop.command("manage.py", "migrate", "delaytasks", "zero")
    with database.begin() as connection:
        connection.execute(text("DROP TABLE yb_delay_alembic_version"))
    assert not create_statements(shop.database_url)
    migrations.upgrade(database)
    assert create_statements(shop.database_url) == by_django
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


@pytest.mark.quick
@pytest.mark.parametrize("fresh_url", ["sqlite"], indirect=True)
def test_djangos_models_need_no_other_migration(shop: ExampleShop) -> None:
    assert "No changes detected" in shop.command(
        "manage.py", "makemigrations", "--check", "--dry-run"
    )


# -- the project ----------------------------------------------------------------------------------


@each_database
def test_the_shops_own_tests_pass_in_djangos_test_databases(shop: ExampleShop) -> None:
    """Django creates, fills, copies and drops the test databases.

    Copying and dropping a database require that no other connection to it is open.
    """
    assert "OK" in shop.command("manage.py", "test")
    assert "OK" in shop.command("manage.py", "test", "--parallel", "2")
    assert "OK" in shop.command("manage.py", "test", "tests.integration.django_kit_tests")


@pytest.mark.parametrize("fresh_url", ["sqlite"], indirect=True)
def test_delays_modules_are_imported_and_the_module_level_functions_are_the_projects(
    shop: ExampleShop,
) -> None:
    script = """from delaytasks import current_delays; from delaytasks.runtime import runtime_of
from shop.celery import app; d = current_delays(); w = runtime_of(d)
tags = [p.tag for p in w.registry if not p.tag.startswith("delaytasks.")]
print("tags", tags, w.celery is app, d.settings.namespace)"""
    shown = shop.command("manage.py", "shell", "-c", script)
    tags = ["order.close", "orders.tasks.send_receipt"]
    assert f"tags {tags} True {shop.environment['SHOP_NAMESPACE']}" in shown


@pytest.mark.parametrize(
    "fresh_url", ["postgresql", pytest.param("sqlite", marks=pytest.mark.quick)], indirect=True
)
def test_orders_are_closed_on_time_unless_they_are_paid_or_rolled_back(shop: ExampleShop) -> None:
    shop.command("manage.py", "migrate")
    shop.serve("{project}/manage.py", "runserver", "--noreload", "127.0.0.1:{port}")
    shop.work()
    shop.check_orders()
    if shop.database_url.startswith("postgresql"):
        # Django's connections have no application name; those of delaytasks have one. Celery closes
        # Django's connections after each task.
        query = text(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = ''"
        )
        database = runtime_of(shop.delays).store.database
        wait_until(
            lambda: database.autocommitted(lambda c: c.execute(query).scalar()) == 0,
            5,
            "Django's connections to close",
        )


# -- Test Django's admin on each database ---------------------------------------------------------


pytest.importorskip("django")


@pytest.mark.parametrize(
    "fresh_url",
    ["postgresql", "mysql", pytest.param("sqlite", marks=pytest.mark.quick)],
    indirect=True,
)
def test_the_tests_of_the_admin_pass(fresh_url: str) -> None:
    # The plugin of pytest-django would refuse to use a database.
    plugins = "no:django no:xdist no:cacheprovider tests.integration.django_admin_settings".split()
    options = [option for plugin in plugins for option in ("-p", plugin)]
    tests = "tests/integration/django_admin_tests.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, tests],
        cwd=ROOT, env={**os.environ, "ADMIN_DATABASE_URL": fresh_url},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
