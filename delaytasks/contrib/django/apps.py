"""What Django calls: the app for INSTALLED_APPS, the system check, and the tables of `migrate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register

from delaytasks.celery import set_project_delays
from delaytasks.contrib.django.instance import project_delays, source_at
from delaytasks.db import migrations
from delaytasks.model.errors import ConfigError
from delaytasks.operate import checks
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


# -- The system check -----------------------------------------------------------------------------


def check_settings(**_: Any) -> list[CheckMessage]:
    """Check the settings without any connection."""
    try:
        checks.check_settings(runtime_of(project_delays()))
    except ConfigError as error:
        hint = "Correct settings.DELAYTASKS or the CELERY_ settings."
        return [Error(str(error), hint, id="delaytasks.E001")]
    return []


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
