"""A thread that does something again and again, and goes on whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable

from delaytasks.core.events import Events


class Loop:
    def __init__(self, name: str, interval_s: float, turn: Callable[[], None], events: Events) -> None:
        self._name = name
        self._interval_s = interval_s
        self._turn = turn
        self._events = events
        self._wake = threading.Event()
        self._is_running = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name=f"delaytasks-{self._name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Do the next turn now."""
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Waits for the turn that is under way."""
        self._is_running = False
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._is_running:
            try:
                self._turn()
            except Exception as error:
                self._events.emit("loop.failed", loop=self._name, error=f"{type(error).__name__}: {error}")
            self._wake.wait(self._interval_s)
            self._wake.clear()
