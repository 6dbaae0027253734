"""The latest value, here a forecast, is kept, and callers rarely wait for a new one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from delaytasks.core import loop as latest
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.loop import MOST_RENEW_S, RENEW_S, RENEW_SHARE, Latest
from tests.unit.manual_monotonic import ManualMonotonic
from tests.waiting import wait_until


class Forecasts:
    """Makes forecasts, which are numbers here, on a clock that the test turns."""

    def __init__(self) -> None:
        self.time = ManualMonotonic()
        self.takes_s = 0.125
        self.error: Exception | None = None
        self.made = 0

    def make(self) -> Any:
        self.time.at += self.takes_s
        self.made += 1
        if self.error is not None:
            raise self.error
        return self.made


@pytest.fixture
def forecasts(monkeypatch: pytest.MonkeyPatch) -> Forecasts:
    """Forecasts that the calling thread makes."""
    found = Forecasts()

    def do(work: Callable[[], object], *_: Any, **__: Any) -> bool:
        work()
        return True

    monkeypatch.setattr(latest, "monotonic", found.time)
    monkeypatch.setattr(latest, "within", lambda _, work: work())
    monkeypatch.setattr(latest, "in_background", do)
    return found


@pytest.mark.parametrize(
    ("takes_s", "rest_s"),
    [(0.125, RENEW_S), (1, RENEW_SHARE), (300, MOST_RENEW_S)],
)
def test_a_slow_forecast_is_made_again_less_often(
    forecasts: Forecasts, takes_s: float, rest_s: float
) -> None:
    forecasts.takes_s = takes_s
    kept: Any = Latest("forecast", forecasts.make)
    assert kept.get() == (1, takes_s)
    forecasts.time.at += rest_s - 1
    assert kept.get() == (1, takes_s + rest_s - 1)
    forecasts.time.at += 1
    assert kept.get() == (2, takes_s)


def test_after_an_error_the_last_forecast_is_kept_until_it_is_too_old(
    forecasts: Forecasts,
) -> None:
    kept: Any = Latest("forecast", forecasts.make)
    assert kept.get() == (1, 0.125)
    forecasts.error = StoreUnavailableError("down")
    forecasts.time.at += RENEW_S
    assert kept.get() == (1, RENEW_S + 0.25)
    forecasts.time.at += RENEW_S
    assert kept.get() is None
    forecasts.error = None
    forecasts.time.at += RENEW_S - 1
    assert kept.get() is None, "after an error, the database rests as well"
    forecasts.time.at += 1
    assert kept.get() == (4, 0.125)


def test_an_error_of_the_program_is_logged(
    forecasts: Forecasts, caplog: pytest.LogCaptureFixture
) -> None:
    forecasts.error = ZeroDivisionError("no worker")
    assert Latest("forecast", forecasts.make).get() is None
    assert "ZeroDivisionError: no worker" in caplog.text


class SlowForecasts:
    """The second forecast waits until the test lets it go on."""

    def __init__(self) -> None:
        self.made = 0
        self.goes_on = threading.Event()

    def make(self) -> Any:
        self.made += 1
        if self.made > 1:
            self.goes_on.wait(30)
        return self.made


def test_callers_get_the_last_forecast_while_a_thread_makes_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, slow = ManualMonotonic(), SlowForecasts()
    monkeypatch.setattr(latest, "monotonic", time)
    monkeypatch.setattr(latest, "FIRST_WAIT_S", 30.0)
    kept: Any = Latest("forecast", slow.make)

    def found() -> Any:
        recent = kept.get()
        return recent and recent[0]

    assert found() == 1
    time.at += RENEW_S
    assert [found(), found()] == [1, 1]
    time.at += RENEW_S + 1
    assert found() is None, "it is too old, and the thread still works"
    slow.goes_on.set()
    wait_until(lambda: found() == 2, 20, "the new forecast")
    assert slow.made == 2
