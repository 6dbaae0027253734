"""`AtWork`, a main process that has started and whose turns a test plans, and Celery's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kombu.asynchronous import Hub

from delaytasks.loops import Loop
from delaytasks.worker.patches import let_calls_wake
from tests.waiting import wait_until
from tests.world.main_process import MainProcess
from tests.world.world import World


def worker_hub() -> Hub:
    """Return an event loop of Celery as a worker changes it."""
    hub = Hub()
    let_calls_wake(hub)
    return hub


class AtWork(MainProcess):
    """A main process that has started. A test names its loops, and plans their turns."""

    def __init__(self, world: World) -> None:
        super().__init__(world, is_stepped=False)
        self.runtime.start()

    @property
    def info(self) -> dict[str, dict[str, Any]]:
        """The state of each loop by its name."""
        found: dict[str, dict[str, Any]] = self.runtime.info()["loops"]
        return found

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

    def _loop(self, name: str) -> Loop:
        return next(loop for loop in self.runtime.loops if loop.name == name)
