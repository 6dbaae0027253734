"""Apply the later changes of the tables. Does nothing if this version or a later one made them."""

from __future__ import annotations

from django.db import migrations

from delaytasks.contrib.django import tables


class Migration(migrations.Migration):
    atomic = False
    dependencies: list[tuple[str, str]] = [("delaytasks", "0009_policy_changes")]
    operations = [migrations.RunPython(tables.upgrade, migrations.RunPython.noop, elidable=False)]
