"""The tables of delaytasks, which SQLAlchemy defines, and the read-only models of them."""

from __future__ import annotations

from django.db import migrations, models
from django.db.migrations.state import ModelState

from delaytasks.contrib.django import models as rows
from delaytasks.contrib.django import tables


def _create(model: type[models.Model]) -> migrations.CreateModel:
    state = ModelState.from_model(model)
    return migrations.CreateModel(state.name, list(state.fields.items()), state.options)


class Migration(migrations.Migration):
    initial = True
    # If tables exist, Alembic continues from them on another connection, so no lock may be held.
    atomic = False
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.RunPython(tables.upgrade, tables.downgrade, elidable=False),
        *map(
            _create,
            (
                rows.DelayTaskRow,
                rows.PolicyRow,
                rows.RecurringScheduleRow,
                rows.BulkOperationRow,
            ),
        ),
    ]
