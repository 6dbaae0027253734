"""`AtWork`, a main process that has started and whose loops a test breaks, and Celery's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kombu.asynchronous import Hub

from delaytasks.loops import Loop
from delaytasks.worker.patches import let_threads_wake
from tests.waiting import wait_until
from tests.world.main_process import MainProcess
from tests.world.world import World


def worker_hub() -> Hub:
    """Return an event loop of Celery as a worker changes it."""
    hub = Hub()
    let_threads_wake(hub)
    return hub


class AtWork(MainProcess):
    """A main process that has started. A test names its loops, and breaks them.

    Parameters
    ----------
    world
        The world that the worker belongs to.
    is_watched
        Whether the loops check each other, once a second. Otherwise only a test calls `check`.
    """

    def __init__(self, world: World, is_watched: bool = True) -> None:
        super().__init__(world, is_stepped=False)
        self._goes_on = threading.Event()
        self.runtime.start()
        for name in () if is_watched else ("watch", "watchdog"):
            self.stop_loop(name)

    @property
    def info(self) -> dict[str, dict[str, Any]]:
        """The state of each loop by its name."""
        return self.runtime.watchdog.info()

    def restarts(self, name: str) -> list[str]:
        """Return the reasons for which a loop was replaced."""
        told = self.world.told("loop.restarted")
        return [fields["reason"] for fields in told if fields["loop"] == name]

    def plan(self, name: str, first: Callable[[], object]) -> threading.Thread:
        """Let the next turn of a loop call `first`, and return the thread of this turn."""
        loop, threads = self._loop(name), list[threading.Thread]()
        turn = loop._turn

        def planned() -> float | None:
            loop._turn = turn
            threads.append(threading.current_thread())
            first()
            return turn()

        loop._turn = planned
        loop.wake()
        wait_until(lambda: threads, 10, f"the planned turn of {name}", 0.001)
        return threads[0]

    def turn(self, name: str) -> threading.Thread:
        """Wait for another turn of a loop, and return its thread."""
        return self.plan(name, lambda: None)

    def rest(self, name: str) -> None:
        """Wait until a loop is between two turns."""
        loop = self._loop(name)
        wait_until(lambda: loop._current and loop._current.began is None, 10, "a rest", 0.001)

    def hang(self) -> None:
        """Wait until the test calls `go_on`, or ends."""
        assert self._goes_on.wait(60)

    def go_on(self) -> None:
        self._goes_on.set()

    def progress(self, name: str) -> None:
        """Report that a long turn of a loop goes on."""
        self._loop(name).report_progress()

    def check(self, name: str, times: int = 2) -> list[str]:
        """Check all loops, and return the reasons for which this one was replaced.

        If much time has passed since the last check, the first one only notices that.
        """
        for _ in range(times):
            self.runtime.watchdog.check()
        return self.restarts(name)

    def stop_loop(self, name: str) -> None:
        self._loop(name).stop()

    def close(self) -> None:
        self.go_on()
        super().close()

    def _loop(self, name: str) -> Loop:
        return next(loop for loop in self.runtime.watchdog.loops if loop.name == name)
