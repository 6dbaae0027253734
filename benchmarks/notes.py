"""The task of all benchmarks: it records when it was due, when it began and when it ended, with the
same code on all sides.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.waiting import wall


def database_url() -> str:
    return os.environ["BENCH_DATABASE_URL"]


def broker_url() -> str:
    return os.environ["BENCH_BROKER_URL"]


def redis_url() -> str:
    """Return the Redis of the `redis` timer and of systems that keep tasks in Redis."""
    return os.environ["BENCH_REDIS_URL"]


@cache
def takes_s() -> float:
    """Return the duration of each task; most cases need none."""
    return float(os.environ.get("BENCH_TAKES_S", "0"))


def computes() -> bool:
    """Return whether a task with a duration computes instead of sleeping."""
    return "BENCH_COMPUTES" in os.environ


def is_one_at_a_time() -> bool:
    """Return whether a process with an event loop runs one task at a time."""
    return "BENCH_ONE_AT_A_TIME" in os.environ


_LINE = struct.Struct("<ddd")
_file: tuple[int, int] = (0, -1)


class Note(NamedTuple):
    due: float
    began: float
    ended: float


def note(due: float, began: float | None = None) -> None:
    """Append one record with a single write of 24 bytes, which stays whole among concurrent
    writers. `began` is now by default.
    """
    global _file
    if _file[0] != os.getpid():
        path = os.environ["BENCH_NOTES"]
        _file = (os.getpid(), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    now = wall()
    os.write(_file[1], _LINE.pack(due, now if began is None else began, now))


def note_begin() -> None:
    """Record the begin as a negative process number, which is never a due time."""
    note(-float(os.getpid()))


def run(due: float) -> None:
    """Run the task, which sleeps or computes if it has a duration."""
    began = wall()
    seconds = takes_s()
    if seconds:
        note_begin()
        if computes():
            compute(seconds)
        else:
            time.sleep(seconds)
    note(due, began)


def compute(seconds: float) -> None:
    """Use the processor for this CPU time of the thread, however busy the machine is."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


class Notes:
    """The benchmark's view of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.path.write_bytes(b"")

    def __len__(self) -> int:
        return self.path.stat().st_size // _LINE.size

    def read(self) -> list[Note]:
        data = self.path.read_bytes()
        return [
            Note(*line) for line in _LINE.iter_unpack(data[: len(data) // _LINE.size * _LINE.size])
        ]
