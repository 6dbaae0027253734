"""Upgrades tables of an earlier version; the first migration makes tables of this version."""

from __future__ import annotations

from django.db import migrations, models

from delaytasks.contrib.django.tables import UpgradeTables


class Migration(UpgradeTables):
    dependencies = [("delaytasks", "0007_finding")]
    operations = [
        *UpgradeTables.operations,
        # Changes only the model, which Django does not manage in the database.
        migrations.AddField("delaytaskrow", "due_time", models.DateTimeField(null=True)),
    ]
