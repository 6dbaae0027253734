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
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
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
    """Of a process and its children."""

    cpu_s: float
    rss_bytes: int


def usage(pid: int) -> Usage | None:
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    cpu, rss = 0, 0
    try:
        for one in [pid, *children(pid)]:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            cpu += int(fields[11]) + int(fields[12])
            rss += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return Usage(cpu / ticks, rss * page)


def rss_bytes_of(program: str) -> int | None:
    """Of all processes here that run this program; None without any."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == program:
                found += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
    return found or None


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "?"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
