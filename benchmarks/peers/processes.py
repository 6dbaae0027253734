"""The processes of a system: its producer, its workers and others."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import family
from benchmarks.peers import environment
from benchmarks.peers.catalogue import System
from benchmarks.processes import BenchmarkProcess


class PeerProcess(BenchmarkProcess):
    """A process of a system. Processes that it started end with it, whatever their group."""

    stop_s = 5.0

    def __init__(
        self, system: System, command: Sequence[str], folder: Path, **variables: str
    ) -> None:
        self.program = environment.launcher(system)
        super().__init__(system.name, command, folder, **variables)

    def kill(self) -> None:
        for pid in family(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the process ended together with its parent
        super().kill()

    def stop(self) -> None:
        descendants = family(self.pid)[1:]
        super().stop()
        for pid in descendants:
            if _is_of_session(pid, self.pid):
                os.kill(pid, signal.SIGKILL)


def _is_of_session(pid: int, session: int) -> bool:
    """Return whether the pid still belongs to the session, since the system may have reused it."""
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False
