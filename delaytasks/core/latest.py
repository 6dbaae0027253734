"""Keeps a recent value that takes long to read, for pages and scrapes, which must not wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from delaytasks.core.bounded_calls import in_background, within
from delaytasks.core.clock import monotonic
from delaytasks.core.errors import StoreError

logger = logging.getLogger(__name__)
#: A value is read again after this time, and after the duration of its reading times `RENEW_SHARE`,
#: so that it costs the database at most half a percent of a core. The latter is at most
#: `MOST_RENEW_S`.
RENEW_S, RENEW_SHARE, MOST_RENEW_S = 60.0, 200, 3600.0
#: The time for which a caller waits if there is no recent value.
FIRST_WAIT_S = 0.5


T = TypeVar("T")


class Latest(Generic[T]):
    """Returns the last value, and reads it again in a thread.

    Parameters
    ----------
    what
        The value's name, for the log.
    read
        Reads the value.
    """

    def __init__(self, what: str, read: Callable[[], T]) -> None:
        self._what = what
        self._read = read
        self._lock = threading.Lock()
        self._found: T | None = None
        self._is_busy = False
        self._began = self._again_at = self._recent_until = float("-inf")

    def get(self) -> tuple[T, float] | None:
        """Return the last value and its age in seconds, or None if none could be read lately.

        A value is returned for twice the time after which it is read again. Only a caller that
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
        elif is_due and not in_background(self._renew, self._what, is_kept=False):
            self._renew()  # no thread can be started
        return self._recent()

    def _recent(self) -> tuple[T, float] | None:
        with self._lock:
            now = monotonic()
            if self._found is None or now > self._recent_until:
                return None
            return self._found, now - self._began

    def _renew(self) -> None:
        began, rest_s = monotonic(), RENEW_S
        found: T | None = None
        try:
            found = self._read()
            rest_s = min(max(RENEW_SHARE * (monotonic() - began), RENEW_S), MOST_RENEW_S)
        except StoreError as error:
            logger.warning("no %s: %s", self._what, error)
        except Exception:
            logger.exception("no %s", self._what)
        with self._lock:
            self._is_busy, self._again_at = False, monotonic() + rest_s
            if found is not None:
                self._found, self._began = found, began
                self._recent_until = self._again_at + rest_s
