"""The dashboard shows each event of a fault, and each of them has a series before its first one."""

from __future__ import annotations

import re

from delaytasks.metrics.files import read_file
from delaytasks.metrics.process import FAULT_EVENTS


def test_the_dashboard_shows_the_fault_events_whose_counters_begin_at_zero() -> None:
    [shown] = re.findall(r'delaytasks_events_total\{event=~\\"([^"\\]+)\\"', read_file("dashboard"))
    assert sorted(shown.split("|")) == sorted(FAULT_EVENTS)
