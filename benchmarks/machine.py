"""Facts about the machine, and the resources of processes, from /proc on Linux.

On other systems these figures are omitted.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("celery", "kombu", "redis", "SQLAlchemy", "psycopg2-binary")


def facts() -> dict[str, str]:
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "processor": _processor(),
        "system": platform.platform(),
        "load at start": load,
        "Python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def load() -> float:
    """Return the load of the last minute. Above the number of cores, figures suffer."""
    return os.getloadavg()[0]


class Usage(NamedTuple):
    """The memory of a process and its descendants, and the CPU time of all of them so far."""

    cpu_s: float
    rss_bytes: int


def usage(pid: int) -> Usage | None:
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    cpu, rss = 0, 0
    try:
        for one in family(pid):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            cpu += sum(map(int, fields[11:15]))
            rss += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return Usage(cpu / ticks, rss * page)


def usage_of(program: str) -> Usage | None:
    """Return the usage of all local processes of this program and their descendants, or None."""
    running = {pid for pid in _pids() if program_of(pid) == program}
    inside = {child for pid in running for child in children(pid)}
    found = [one for pid in running - inside if (one := usage(pid)) is not None]
    return (
        Usage(sum(one.cpu_s for one in found), sum(one.rss_bytes for one in found))
        if found
        else None
    )


def rss_bytes_of(program: str) -> int | None:
    """Return the memory of all local processes of this program, or None."""
    found = 0
    for pid in _pids():
        try:
            if program_of(pid) == program:
                found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                    "SC_PAGE_SIZE"
                )
        except (OSError, IndexError, ValueError):
            continue  # the process has ended in the meantime
    return found or None


def family(pid: int) -> list[int]:
    """Return the process and its descendants, level by level."""
    found = [pid]
    for one in found:
        found.extend(children(one))
    return found


def children(pid: int) -> list[int]:
    """Return the children of all threads, since any thread may have started one."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found.extend(int(child) for child in listed.read_text().split())
        except OSError:
            continue  # the thread has ended in the meantime
    return found


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def program_of(pid: int) -> str:
    """Return the name of the process's program, or an empty string if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "?"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?"
    )
