"""The definitions of Sentry's monitors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sentry_sdk")
from delaytasks.contrib.sentry import monitors
from delaytasks.contrib.sentry.monitors import CheckIns, config_of


def test_the_timing_of_another_program_has_no_monitor() -> None:
    schedule: Any = SimpleNamespace(timing="every now and then", tz="UTC")
    assert config_of(schedule) is None
    schedule.timing = "every 300"
    assert config_of(schedule) is not None


def test_a_bounded_number_of_definitions_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def get(name: str) -> Any:
        read.append(name)
        return SimpleNamespace(timing="every 300", tz="UTC")

    app = SimpleNamespace(delaytasks=SimpleNamespace(recurring=SimpleNamespace(get=get)))
    monkeypatch.setattr(monitors, "current_app", app)
    monkeypatch.setattr(monitors, "MAX_MONITOR_DEFINITIONS", 3)
    check_ins = CheckIns()
    for name in "abcd":
        check_ins._config_of(name)
    for name in "bcd":  # still known
        check_ins._config_of(name)
    assert read == list("abcd")
    check_ins._config_of("a")
    assert read == list("abcda")
    assert len(check_ins._configs) == 3
