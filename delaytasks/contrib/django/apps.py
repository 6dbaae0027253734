"""What Django calls: the app for INSTALLED_APPS, the system checks, and the tables of `migrate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Tags, Warning, register

from delaytasks.celery import set_project_delays
from delaytasks.contrib.django.django_connection import MIGRATE_REMEDY, source_at
from delaytasks.contrib.django.instance import project_delays
from delaytasks.db import migrations
from delaytasks.model.errors import ConfigError
from delaytasks.operate.health import HealthChecks
from delaytasks.runtime import runtime_of


class DelayTasksConfig(AppConfig):
    name = "delaytasks.contrib.django"
    label = "delaytasks"
    verbose_name = "Delayed tasks"
    default_auto_field = "django.db.models.BigAutoField"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Before Django imports any models.py, which may register processors.
        set_project_delays(project_delays())

    def ready(self) -> None:
        project_delays().import_processors()
        register(check_settings, "delaytasks")
        # `check --database` and `migrate` run those with this tag.
        register(check_database, Tags.database, "delaytasks")


# -- The system checks ----------------------------------------------------------------------------


def check_settings(**_: Any) -> list[CheckMessage]:
    """Check the settings without any connection."""
    delays = project_delays()
    runtime = runtime_of(delays)
    found: list[CheckMessage] = []
    try:
        runtime.checks.check_settings()
    except ConfigError as error:
        hint = "Correct settings.DELAYTASKS or the CELERY_ settings."
        found.append(Error(str(error), hint, id="delaytasks.E001"))
    conf = runtime.celery.conf
    if runtime.direct_timer is None and not (conf.broker_url or conf.broker_write_url):
        found.append(
            Warning(
                "No broker is configured, and Celery looks for RabbitMQ on this machine.",
                "Set CELERY_BROKER_URL, or run tasks without a broker: "
                "DELAYTASKS = {'timer': 'direct'}.",
                id="delaytasks.W001",
            )
        )
    return found


def check_database(databases: Iterable[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that the database answers, and its tables."""
    delays = project_delays()
    is_migrating = sys.argv[1:2] == ["migrate"]  # the command makes the tables
    if is_migrating or delays.alias not in (databases or ()):
        return []
    runtime = runtime_of(delays)
    problems = [each for each in HealthChecks(runtime, "api").ready() if not each.is_ok]
    # Otherwise Django's test runner could not drop the database.
    runtime.store.database.dispose()
    return [
        Warning(
            f"Database {delays.alias!r}, {each.name}: {each.detail}.",
            MIGRATE_REMEDY.capitalize()
            if each.name == "tables"
            else "Check the database and the rights of its user.",
            id="delaytasks.W003",
        )
        for each in problems
    ]


# -- The tables, which are those of `delaytasks db upgrade` ---------------------------------------


def upgrade(_apps: Any, schema_editor: Any) -> None:
    _run_alembic(schema_editor, migrations.upgrade, "head")


def downgrade(_apps: Any, schema_editor: Any) -> None:
    """Run Alembic's downgrade, which keeps a task table that has rows."""
    _run_alembic(schema_editor, migrations.downgrade, "base")


def _run_alembic(schema_editor: Any, command: Callable[..., None], revision: str) -> None:
    """Migrate on Django's connection: no other one sees a test database in memory."""
    delays, alias = project_delays(), schema_editor.connection.alias
    if alias == delays.alias:
        settings, database = delays.settings, runtime_of(delays).store.database
        names = settings.name_prefix, settings.table_schema or None
        command(database, *names, revision, connect=source_at(alias).connect)
