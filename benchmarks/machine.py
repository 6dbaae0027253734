"""The machine's facts, and what processes cost, as Linux tells it in /proc; elsewhere those figures are left out."""

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
    """How many processes wanted to run in the last minute: above the number of cores, figures suffer."""
    return os.getloadavg()[0]


class Usage(NamedTuple):
    """Of a process and all that descend from it; the time of those that have ended is in it, too."""

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
    """Of all processes here that run this program, and of their descendants; None without any."""
    running = {pid for pid in _pids() if _comm(pid) == program}
    inside = {child for pid in running for child in children(pid)}
    found = [one for pid in running - inside if (one := usage(pid)) is not None]
    return (
        Usage(sum(one.cpu_s for one in found), sum(one.rss_bytes for one in found))
        if found
        else None
    )


def rss_bytes_of(program: str) -> int | None:
    """Of all processes here that run this program; None without any."""
    found = 0
    for pid in _pids():
        try:
            if _comm(pid) == program:
                found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                    "SC_PAGE_SIZE"
                )
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
    return found or None


def family(pid: int) -> list[int]:
    """The process, then its children, then theirs."""
    found = [pid]
    for one in found:
        found.extend(children(one))
    return found


def children(pid: int) -> list[int]:
    """Of all of its threads: any of them may have started one."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found.extend(int(child) for child in listed.read_text().split())
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _comm(pid: int) -> str:
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
