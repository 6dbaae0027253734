"""Measures for how long a worker has been without its broker, its timer and beat."""

from __future__ import annotations

from collections.abc import Callable

from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import Timer
from delaytasks.core.workers import ServiceTimes


class ServiceWatch:
    """Records when a worker lost a service, for the worker's row.

    Each attribute is written as a whole, so that several threads may use it.

    Parameters
    ----------
    timer
        The timer of the worker.
    check_timer
        Lets a timer that is down try its server, since an idle worker arms nothing.
    """

    def __init__(self, timer: Timer, check_timer: Callable[[], object]) -> None:
        self._timer = timer
        self._check_timer = check_timer
        self._broker_lost_at: float | None = None
        self._timer_lost_at: float | None = None
        self._beat_at = monotonic()

    def mark_broker_lost(self) -> None:
        if self._broker_lost_at is None:
            self._broker_lost_at = monotonic()

    def mark_broker_back(self) -> None:
        if self._broker_lost_at is not None:
            self._beat_at = monotonic()  # no message of beat could arrive in the meantime
        self._broker_lost_at = None

    def mark_beat(self) -> None:
        """Record a message of beat."""
        self._beat_at = monotonic()

    def times(self, reads_beat: bool) -> ServiceTimes:
        """Return the present times. `reads_beat`: the worker consumes beat's messages."""
        if not self._timer.is_up:
            self._check_timer()
        now = monotonic()
        if self._timer.is_up:
            self._timer_lost_at = None
        elif self._timer_lost_at is None:
            self._timer_lost_at = now
        broker_lost_at, timer_lost_at = self._broker_lost_at, self._timer_lost_at
        return ServiceTimes(
            None if broker_lost_at is None else now - broker_lost_at,
            None if timer_lost_at is None else now - timer_lost_at,
            now - self._beat_at if reads_beat else None,
        )
