"""Upgrades tables of an earlier version; the first migration makes tables of this version."""

from __future__ import annotations

from delaytasks.contrib.django.tables import UpgradeTables


class Migration(UpgradeTables):
    dependencies = [("delaytasks", "0006_lines")]
