"""Apply the later changes of the tables. Does nothing if this version or a later one made them."""

from __future__ import annotations

from django.db import migrations, models

from delaytasks.contrib.django.tables import UpgradeTables


class Migration(UpgradeTables):
    dependencies = [("delaytasks", "0010_waitlist")]
    operations = [
        *UpgradeTables.operations,
        # These change only the model, which Django does not manage in the database.
        migrations.AddField("delaytaskrow", "result", models.TextField(null=True)),
        migrations.AddField(
            "delaytaskrow", "concurrency_key", models.CharField(max_length=255, null=True)
        ),
        migrations.AddField("delaytaskrow", "meta", models.TextField(null=True)),
        migrations.AddField("delaytaskrow", "cancel_request", models.SmallIntegerField(null=True)),
    ]
