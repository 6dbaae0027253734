"""Apply the later changes of the tables. Does nothing if this version or a later one made them."""

from __future__ import annotations

from delaytasks.contrib.django.tables import UpgradeTables


class Migration(UpgradeTables):
    dependencies = [("delaytasks", "0017_lost_workers")]
