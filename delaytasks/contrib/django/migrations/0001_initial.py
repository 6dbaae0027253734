"""The tables of delaytasks. SQLAlchemy defines them; Django has a read-only model."""

from __future__ import annotations

from django.db import migrations, models

from delaytasks.contrib.django import tables
from delaytasks.contrib.django.models import table_name


class Migration(migrations.Migration):
    initial = True
    # Alembic adopts an existing table on another connection, so no lock may be held here.
    atomic = False
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.RunPython(tables.upgrade, tables.downgrade, elidable=False),
        migrations.CreateModel(
            name="DelayTaskRow",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("tag", models.CharField(max_length=128)),
                ("message_body", models.TextField()),
                ("status", models.SmallIntegerField()),
                ("error_stack", models.TextField(null=True)),
                ("version", models.BigIntegerField()),
                ("ip_address", models.BigIntegerField(null=True)),
                ("delay_time", models.BigIntegerField()),
                ("expected_time", models.DateTimeField()),
                ("execution_time", models.DateTimeField(null=True)),
                ("create_time", models.DateTimeField()),
                ("update_time", models.DateTimeField()),
                ("queue", models.CharField(max_length=100)),
                ("priority", models.SmallIntegerField()),
                ("headers", models.TextField(null=True)),
                ("attempts", models.IntegerField()),
                ("lapses", models.IntegerField()),
                ("lease_until", models.DateTimeField(null=True)),
                ("worker", models.CharField(max_length=255, null=True)),
                ("task_key", models.CharField(max_length=191, null=True)),
            ],
            options={
                "verbose_name": "delayed task",
                "db_table": table_name(),
                "managed": False,
                "default_permissions": ("view",),
            },
        ),
    ]
