"""What came to the tables since: nothing, where they were made by this version or a later one."""

from __future__ import annotations

from django.db import migrations

from delaytasks.contrib.django import tables


class Migration(migrations.Migration):
    atomic = False
    dependencies: list[tuple[str, str]] = [("delaytasks", "0008_facts")]
    operations = [migrations.RunPython(tables.upgrade, migrations.RunPython.noop, elidable=False)]
