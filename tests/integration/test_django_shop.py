"""Test the Django example: its migrations on each database, its own tests, and a real worker."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from functools import partial

import pytest

from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from tests.integration.conftest import run_example
from tests.migration.test_migrations import schema_differences
from tests.running import output_of
from tests.world.recording import delays_on

pytestmark = pytest.mark.slow

pytest.importorskip("django")


databases = pytest.mark.parametrize("fresh_url", ["postgresql", "mysql", "sqlite"], indirect=True)
manage = partial(run_example, "django_shop")


# -- migrations -----------------------------------------------------------------------------------


@databases
def test_migrate_makes_and_finds_the_metadatas_tables_as_alembic_does(fresh_url: str) -> None:
    migrate = partial(manage, fresh_url, "manage.py", "migrate")
    with closing(delays_on(fresh_url)) as delays:
        database = runtime_of(delays).store.database
        migrate()
        assert schema_differences(database, "", None) == []
        assert migrations.current(database) == migrations.head()
        wanted = manage(fresh_url, "manage.py", "makemigrations", "--check", "--dry-run")
        assert "No changes detected" in wanted, "Django's models need no other migration"
        migrate("delaytasks", "zero")
        assert migrations.current(database) is None
        migrations.upgrade(database)
        task = delays.schedule_delay("order.close", {"order": 7}, 3600)
        migrate()
        assert delays.get(task).body == {"order": 7}
        assert schema_differences(database, "", None) == []

        # The reverse migration keeps a task table that has rows.
        migrate("delaytasks", "zero")
        migrate()
        assert delays.get(task).body == {"order": 7}


# -- the project ----------------------------------------------------------------------------------


@databases
def test_the_shops_own_tests_pass_in_djangos_test_databases(fresh_url: str) -> None:
    """Django creates, fills, copies and drops the test databases.

    Copying and dropping a database require that no other connection to it is open.
    """
    tests = [".", "tests.integration.django_kit_tests"]
    assert "OK" in manage(fresh_url, "manage.py", "test", "--parallel", "2", *tests)


# -- Django's admin, whose queries are those of the ORM, and its moves those of each face ----------


@pytest.mark.parametrize("fresh_url", ["postgresql", "sqlite"], indirect=True)
def test_the_tests_of_the_admin_pass(fresh_url: str) -> None:
    # The plugin of pytest-django would refuse to use a database.
    plugins = "no:django no:xdist no:cacheprovider tests.integration.django_admin_settings".split()
    options = [option for plugin in plugins for option in ("-p", plugin)]
    tests = "tests/integration/django_admin_tests.py"
    command = [sys.executable, "-m", "pytest", "-q", *options, tests]
    output_of(command, env={**os.environ, "ADMIN_DATABASE_URL": fresh_url})


# -- without a broker -----------------------------------------------------------------------------


@pytest.mark.parametrize("fresh_url", ["sqlite"], indirect=True)
def test_celery_closes_djangos_connections_in_the_processes_of_run(fresh_url: str) -> None:
    delays = partial(manage, fresh_url, "manage.py", "delays")
    manage(fresh_url, "manage.py", "migrate")
    delays("schedule", "order.close", '{"order": 7}', "--delay", "0")
    said = delays("run", "-c", "1")
    assert "took 1 task" in said
    assert "Signal handler" not in said, "Celery's own code for Django failed"
