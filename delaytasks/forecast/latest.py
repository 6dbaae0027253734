"""Keeps a recent forecast for callers that must not wait for one, such as pages and scrapes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from delaytasks.core.bounded_calls import in_background, within
from delaytasks.core.clock import monotonic
from delaytasks.core.errors import StoreError
from delaytasks.forecast.result import Forecast

logger = logging.getLogger(__name__)
#: A forecast is made again after this time, and after its duration times `REST_PER_FORECAST`:
#: millions of waiting tasks take seconds, which may cost the database half a percent of a core. The
#: latter is at most `MOST_RENEW_S`.
RENEW_S, REST_PER_FORECAST, MOST_RENEW_S = 60.0, 200, 3600.0
#: The time for which a caller waits if there is no recent forecast.
FIRST_WAIT_S = 0.5


class RecentForecast(NamedTuple):
    forecast: Forecast
    age_s: float


class LatestForecast:
    """Returns the last forecast, and makes it again in a thread.

    Parameters
    ----------
    make
        Makes a forecast.
    """

    def __init__(self, make: Callable[[], Forecast]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._found: Forecast | None = None
        self._is_busy = False
        self._began = self._again_at = self._recent_until = float("-inf")

    def get(self) -> RecentForecast | None:
        """Return the last forecast, or None if none could be made lately.

        A forecast is returned for twice the time after which it is made again. Only a caller that
        finds none waits for a new one, for at most `FIRST_WAIT_S` seconds.
        """
        with self._lock:
            is_due = not self._is_busy and monotonic() >= self._again_at
            self._is_busy |= is_due
        if is_due and self._recent() is None:
            try:
                within(FIRST_WAIT_S, self._renew)
            except TimeoutError:
                pass  # a later caller gets it
        elif is_due and not in_background(self._renew, "forecast", is_kept=False):
            self._renew()  # no thread can be started
        return self._recent()

    def _recent(self) -> RecentForecast | None:
        with self._lock:
            now = monotonic()
            if self._found is None or now > self._recent_until:
                return None
            return RecentForecast(self._found, now - self._began)

    def _renew(self) -> None:
        began, rest_s = monotonic(), RENEW_S
        found: Forecast | None = None
        try:
            found = self._make()
            rest_s = min(max(REST_PER_FORECAST * (monotonic() - began), RENEW_S), MOST_RENEW_S)
        except StoreError as error:
            logger.warning("no forecast: %s", error)
        except Exception:
            logger.exception("no forecast")
        with self._lock:
            self._is_busy, self._again_at = False, monotonic() + rest_s
            if found is not None:
                self._found, self._began = found, began
                self._recent_until = self._again_at + rest_s
