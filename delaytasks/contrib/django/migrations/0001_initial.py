"""The tables of delaytasks, which SQLAlchemy defines, and the read-only model of tasks."""

from __future__ import annotations

from django.db import migrations
from django.db.migrations.state import ModelState

from delaytasks.contrib.django.apps import downgrade, upgrade
from delaytasks.contrib.django.models import DelayTaskRow

_ROW = ModelState.from_model(DelayTaskRow)


class Migration(migrations.Migration):
    initial = True
    # If tables exist, Alembic continues from them on another connection, so no lock may be held.
    atomic = False
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.RunPython(upgrade, downgrade, elidable=False),
        migrations.CreateModel(_ROW.name, list(_ROW.fields.items()), _ROW.options),
    ]
