"""A worker that is frozen for a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from delaytasks.model.clock import to_us
from delaytasks.run import calls
from delaytasks.worker import quick_loops
from tests.waiting import wait_until
from tests.world.world import World


class FrozenWorker:
    """A process that runs tasks, and the main process that renews its leases, with a clock that a
    test sets as if the host stood still meanwhile."""

    def __init__(self, world: World) -> None:
        self.now_s = 100_000.0
        self._patches = ExitStack()
        read: Any = self._read_clock
        for module in (calls, quick_loops):
            self._patches.enter_context(mock.patch.object(module, "monotonic", read))
        self.world = world
        processes = world.worker().processes
        self._memory = processes.memory
        chunk_began_us = to_us(world.now()) - int(world.delays.settings.lease_s * 1e6)
        self._dispatcher = cast("Any", SimpleNamespace(running=lambda: ([chunk_began_us], {})))
        #: The ids of the pool's processes.
        self.pids: list[int | None] = [os.getpid()]
        pool = SimpleNamespace(info={"processes": self.pids})
        worker: Any = SimpleNamespace(
            runtime=world.runtime,
            processes=processes,
            dispatcher=self._dispatcher,
            celery_worker=SimpleNamespace(pool=pool, hub=None, hostname="frozen"),
        )
        self._keeper = quick_loops.LeasesLoop(worker)
        self._keeper.sign_off()  # the clock jumps by more than a silence after which rows are lost

    def _read_clock(self) -> float:
        return self.now_s

    def close(self) -> None:
        self._patches.close()

    def renew(self) -> None:
        """Let the main process renew the leases once."""
        self.keep_leases(lambda: self._memory.asked_at == self.now_s)

    def keep_leases(self, until: Callable[[], bool]) -> None:
        """Let the main process work until the condition is true."""
        self._keeper.loop.start()
        try:
            wait_until(until, 10, "the work of the main process")
        finally:
            self._keeper.loop.stop()

    def find_dead(self, pid: int, has_reported: bool = True) -> None:
        """Let the main process find once that a process has died."""
        found, turns = list[int](), list[None]()

        def running() -> Any:
            turns.append(None)
            return [], {pid: (7,)} if has_reported and not found else {}

        self._dispatcher.running = running
        self._dispatcher.process_died = found.append
        self.keep_leases(lambda: len(turns) > 2)
        assert found == [pid]
