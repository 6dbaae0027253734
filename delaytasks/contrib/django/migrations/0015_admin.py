"""The models of the admin, and their permissions. Django does not manage their tables, which exist,
and does not compare their fields."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

from delaytasks.contrib.django.models import table_name

_ROW_OPTIONS = {"managed": False, "default_permissions": ("view", "change")}


def _create(name: str, key: Any, table: str, **options: str) -> migrations.CreateModel:
    return migrations.CreateModel(
        name, [key], {**_ROW_OPTIONS, "db_table": table_name(table), **options}
    )


def _name(length: int) -> tuple[str, Any]:
    return "name", models.CharField(max_length=length, primary_key=True, serialize=False)


class Migration(migrations.Migration):
    dependencies = [("delaytasks", "0014_outages_and_beat")]
    operations = [
        migrations.AlterModelOptions(
            "delaytaskrow", {**_ROW_OPTIONS, "verbose_name": "delayed task"}
        ),
        _create(
            "PolicyRow",
            _name(128),
            "yb_delay_policy",
            verbose_name="policy",
            verbose_name_plural="policies",
        ),
        _create(
            "RecurringScheduleRow",
            _name(166),
            "yb_delay_recurring",
            verbose_name="recurring schedule",
        ),
        _create(
            "BulkOperationRow",
            ("id", models.BigIntegerField(primary_key=True, serialize=False)),
            "yb_delay_audit",
            verbose_name="bulk operation",
        ),
    ]
