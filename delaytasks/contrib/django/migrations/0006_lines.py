"""Upgrades tables of an earlier version; the first migration makes tables of this version."""

from __future__ import annotations

from django.db import migrations

from delaytasks.contrib.django import tables


class Migration(migrations.Migration):
    atomic = False
    dependencies: list[tuple[str, str]] = [("delaytasks", "0005_audit")]
    operations = [migrations.RunPython(tables.upgrade, migrations.RunPython.noop, elidable=False)]
