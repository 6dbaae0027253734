"""Upgrades tables of an earlier version; the first migration makes tables of this version."""

from __future__ import annotations

from django.db import migrations, models

from delaytasks.contrib.django import tables


class Migration(migrations.Migration):
    atomic = False
    dependencies: list[tuple[str, str]] = [("delaytasks", "0007_finding")]
    operations = [
        migrations.RunPython(tables.upgrade, migrations.RunPython.noop, elidable=False),
        # Changes only the model, which Django does not manage in the database.
        migrations.AddField("delaytaskrow", "due_time", models.DateTimeField(null=True)),
    ]
