"""Workers and beats as users start them: separate processes that are ended by their pids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import Usage, usage
from benchmarks.waiting import BenchError, wait_until

ROOT = Path(__file__).parents[1]
POOL = ["-P", "prefork", "-c", "2"]
STOP_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BenchmarkProcess:
    """A command in its own process group that writes its output to a file."""

    #: The program that runs the command; this Python by default.
    program: Sequence[str] = (sys.executable, "-m")
    stop_s = STOP_S

    def __init__(self, name: str, command: Sequence[str], folder: Path, **environment: str) -> None:
        self.name = name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.program, *command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def usage(self) -> Usage | None:
        return usage(self.pid)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def expect(self, word: str, deadline_s: float) -> str:
        """Wait until the last line begins with `word`, and return the rest of the line."""

        def has_said() -> bool:
            if self.last_words(1).startswith(word):
                return True
            if not self.is_alive:
                raise BenchError(f"{self.name} ended:\n{self.last_words()}")
            return False

        wait_until(has_said, deadline_s, f"{self.name} to say {word!r}")
        return self.last_words(1).removeprefix(word).strip()

    def kill(self) -> None:
        """Kill the process group, as the kernel does when memory is exhausted."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask the process to end, then kill the rest of its group."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self.stop_s)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def last_words(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def worker(
    app: str, name: str, folder: Path, notes: str, pool: Sequence[str] = POOL, **environment: str
) -> BenchmarkProcess:
    command = ["celery", "-A", app, "worker", *pool, "-n", f"{name}@%h", "--loglevel", "WARNING"]
    return BenchmarkProcess(name, command, folder, BENCH_NOTES=notes, **environment)


def drainer(app: str, name: str, folder: Path, notes: str, **environment: str) -> BenchmarkProcess:
    """Start a worker without a broker."""
    return BenchmarkProcess(
        name,
        ["delaytasks", "-A", app, "run", "--forever", "-c", "2"],
        folder,
        BENCH_NOTES=notes,
        **environment,
    )


def beat(app: str, folder: Path, **environment: str) -> BenchmarkProcess:
    schedule = folder / f"beat-{time.monotonic_ns()}"
    command = ["celery", "-A", app, "beat", "-s", str(schedule), "--loglevel", "WARNING"]
    return BenchmarkProcess("beat", command, folder, **environment)
