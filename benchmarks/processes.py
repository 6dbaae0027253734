"""The processes of a run, their memory and CPU time from /proc, and facts about the machine."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.waiting import BenchError, wait_until

ROOT = Path(__file__).parents[1]
PYTHON = (sys.executable, "-m")
STOP_S = 30.0


def facts() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ("celery", "kombu", "redis", "SQLAlchemy", "psycopg2-binary")
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": models[0] if models else "?",
        "system": platform.platform(),
        "load at start": f"{load():.2f}",
        "Python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def load() -> float:
    """Return the load of the last minute. Above the number of cores, figures suffer."""
    return os.getloadavg()[0]


class Usage(NamedTuple):
    """The CPU time so far, and the memory, of some processes and their descendants."""

    cpu_s: float
    rss_mb: float


def usage(pids: Sequence[int]) -> Usage:
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    cpu = rss = 0
    for pid in {one for first in pids for one in family(first)}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            rss += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # the process has ended in the meantime
        cpu += sum(map(int, fields[11:15]))
    return Usage(cpu / ticks, rss * page / 2**20)


def pids_of(*programs: str) -> list[int]:
    """Return the local processes of these programs."""
    found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in found if program_of(pid) in programs]


def program_of(pid: int) -> str:
    """Return the name of the process's program, or an empty string if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def family(pid: int) -> list[int]:
    """Return the process and its descendants. Any thread may have started one."""
    found = [pid]
    for one in found:
        for listed in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found.extend(map(int, listed.read_text().split()))
            except OSError:
                continue  # the thread has ended in the meantime
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BenchmarkProcess:
    """A command in its own process group that writes its output to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        program: Sequence[str] = PYTHON,
        **environment: str,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*program, *command],
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

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def expect(self, opening: str, deadline_s: float) -> str:
        """Wait for a line that begins with `opening`, and return the rest of the last one."""
        heard: list[str] = []

        def has_said() -> bool:
            lines = self.log.read_text(errors="replace").splitlines()
            heard[:] = [line for line in lines if line.startswith(opening)]
            if not heard and not self.is_alive:
                raise BenchError(f"{self.name} ended:\n{self.last_words()}")
            return bool(heard)

        wait_until(has_said, deadline_s, f"{self.name} to say {opening!r}", 0.02)
        return heard[-1].removeprefix(opening).strip()

    def kill(self) -> None:
        """Kill the process and its descendants, as a power failure does."""
        for pid in family(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the process ended together with its parent
        self._process.wait()

    def stop(self, within_s: float = STOP_S) -> None:
        """Ask the process to end, then kill what is left of it and of its descendants."""
        descendants = family(self.pid)[1:] if self.is_alive else []
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                pass
        for kill, pid in [(os.killpg, self.pid), *((os.kill, pid) for pid in descendants)]:
            try:
                # The system may have given a descendant's number to another process.
                if pid == self.pid or os.getsid(pid) == self.pid:
                    kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def last_words(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
