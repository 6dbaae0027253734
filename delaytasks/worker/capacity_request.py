"""A request for capacity, which the dispatcher grants when a process of the pool becomes free."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CapacityRequest:
    """One thread requests capacity, and another one grants it by setting the event `granted`."""

    def __init__(self) -> None:
        self.granted = threading.Event()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def withdraw(self) -> None:
        self._is_open = False

    def grant_if(self, has_capacity: Callable[[], int]) -> None:
        """Grant the request if there is one and `has_capacity` returns more than 0."""
        if self._is_open and has_capacity():
            self._is_open = False
            self.granted.set()
