"""Test the Django example: its migrations on each database, its own tests, and a real worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from tests.integration.shops import ExampleShop, fresh_database
from tests.migration.test_migrations import schema_differences
from tests.running import Process, output_of
from tests.waiting import wait_until

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
            shown = [connection.execute(text(f"SHOW CREATE TABLE {name}")).one() for name in names]
            # The indexes of a table have no order.
            return {row[0]: " ".join(sorted(row[1].replace(",", "").split("\n"))) for row in shown}
        found = {str(name): " ".join(sql.split()) for name, sql in connection.execute(text(query))}
    engine.dispose()
    return found


# -- migrations -----------------------------------------------------------------------------------


@databases
def test_migrate_makes_and_finds_the_metadatas_tables_as_alembic_does(shop: ExampleShop) -> None:
    database = runtime_of(shop.delays).store.database
    shop.command("manage.py", "migrate")
    assert schema_differences(database, "", None) == []
    assert migrations.current(database) == migrations.head()
    wanted = shop.command("manage.py", "makemigrations", "--check", "--dry-run")
    assert "No changes detected" in wanted, "Django's models need no other migration"
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


# -- the project ----------------------------------------------------------------------------------


@databases
def test_the_shops_own_tests_pass_in_djangos_test_databases(shop: ExampleShop) -> None:
    """Django creates, fills, copies and drops the test databases.

    Copying and dropping a database require that no other connection to it is open.
    """
    assert "OK" in shop.command("manage.py", "test")
    assert "OK" in shop.command("manage.py", "test", "--parallel", "2")
    assert "OK" in shop.command("manage.py", "test", "tests.integration.django_kit_tests")


SHOPPING = """from django.test import Client
customer = Client(SERVER_NAME="localhost")
paid, unpaid = (customer.post("/orders").json()["number"] for _ in range(2))
assert customer.post(f"/orders/{paid}/pay").status_code == 200"""


@pytest.mark.parametrize("fresh_url", ["postgresql", "mysql"], indirect=True)
def test_a_worker_ends_unpaid_orders_and_sends_receipts(shop: ExampleShop, tmp_path: Path) -> None:
    shop.environment["CELERY_BROKER_URL"] = f"delaytasks-files://localhost/{tmp_path}"
    shop.command("manage.py", "migrate")
    command = [sys.executable, *"-W ignore -m celery -A shop worker -l INFO -c 1".split()]
    worker = Process(command, shop.environment, tmp_path / "worker.log")
    try:
        shop.command("manage.py", "shell", "-c", SHOPPING)
        ends = ["CANCELLED", "DONE", "DONE"]
        found = shop.delays.find
        wait_until(lambda: sorted(t.status.name for t in found()) == ends, 40, worker.log)
        query = "SELECT status FROM orders_order ORDER BY id"
        with runtime_of(shop.delays).store.database.begin() as connection:
            statuses = connection.exec_driver_sql(query).scalars().all()
        assert statuses == ["paid", "closed"]
        assert worker.log().count("the receipt of order") == 1
    finally:
        worker.terminate()


# -- Test Django's admin on each database ---------------------------------------------------------


@pytest.mark.parametrize("fresh_url", ["postgresql", "mysql", "sqlite"], indirect=True)
def test_the_tests_of_the_admin_pass(fresh_url: str) -> None:
    # The plugin of pytest-django would refuse to use a database.
    plugins = "no:django no:xdist no:cacheprovider tests.integration.django_admin_settings".split()
    options = [option for plugin in plugins for option in ("-p", plugin)]
    tests = "tests/integration/django_admin_tests.py"
    command = [sys.executable, "-m", "pytest", "-q", *options, tests]
    output_of(command, env={**os.environ, "ADMIN_DATABASE_URL": fresh_url})
