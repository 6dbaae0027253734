"""The availability of a service, with a rest after each failure and a callback for each change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from delaytasks.core.clock import monotonic
from delaytasks.core.forks import reset_in_child

#: Seconds after a failure in which callers do not try, so that they do not wait for the service.
SERVICE_REST_S = 1.0


class Availability:
    """Calls `on_down(error)` or `on_up()` once for each change. Thread-safe."""

    def __init__(
        self,
        on_down: Callable[[str], None],
        on_up: Callable[[], None] = lambda: None,
        rest_s: float = SERVICE_REST_S,
    ) -> None:
        self._on_down = on_down
        self._on_up = on_up
        self._rest_s = rest_s
        self.is_up = True
        self._rests_until = 0.0
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def is_resting(self) -> bool:
        return monotonic() < self._rests_until

    def failed(self, error: str) -> None:
        self._rests_until = monotonic() + self._rest_s
        if self._turn(is_up=False):
            self._on_down(error)

    def answered(self) -> None:
        self._rests_until = 0.0
        if not self.is_up and self._turn(is_up=True):
            self._on_up()

    def _turn(self, is_up: bool) -> bool:
        with self._lock:
            is_new, self.is_up = self.is_up is not is_up, is_up
            return is_new
