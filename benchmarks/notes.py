"""The task of all benchmarks: it records when it was due and when it ran, with the same code on all
sides.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.settings import notes_path, takes_s

_LINE = struct.Struct("<dd")
_file: tuple[int, int] = (0, -1)


class Note(NamedTuple):
    due: float
    at: float


def note(due: float) -> None:
    """Append one record with a single write of 16 bytes, which stays whole among concurrent
    writers.
    """
    global _file
    if _file[0] != os.getpid():
        path = notes_path()
        assert path is not None, "tasks must run in the workers of the benchmark"
        _file = (os.getpid(), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    os.write(_file[1], _LINE.pack(due, time.time_ns() / 1e9))


def note_begin() -> None:
    """Record the begin as a negative process number, which is never a due time."""
    note(-float(os.getpid()))


def run(due: float) -> None:
    """Run the task. If it has a duration, record its process and its end."""
    seconds = takes_s()
    if seconds:
        note_begin()
        time.sleep(seconds)
    note(due)


class Notes:
    """The benchmark's view of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clear()

    @property
    def path(self) -> str:
        return str(self._path)

    def clear(self) -> None:
        self._path.write_bytes(b"")

    def __len__(self) -> int:
        return self._path.stat().st_size // _LINE.size

    def read(self) -> list[Note]:
        data = self._path.read_bytes()
        return [
            Note(*pair) for pair in _LINE.iter_unpack(data[: len(data) // _LINE.size * _LINE.size])
        ]
