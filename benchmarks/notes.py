"""All that a task does here: it notes when it was due and when it ran, on both sides with the same few lines."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.where import notes_path, takes_s

_LINE = struct.Struct("<dd")
_file: tuple[int, int] = (0, -1)


class Note(NamedTuple):
    due: float
    at: float


def note(due: float) -> None:
    """One write of 16 bytes at the end of the file: whole, whoever else writes."""
    global _file
    if _file[0] != os.getpid():
        path = notes_path()
        assert path is not None, "tasks run in workers that the benchmark starts"
        _file = (os.getpid(), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    os.write(_file[1], _LINE.pack(due, time.time_ns() / 1e9))


def note_begin() -> None:
    """By the number of the process below zero, which no task is due at."""
    note(-float(os.getpid()))


def run(due: float) -> None:
    """The whole task: where that takes time it notes who begins, and its end."""
    seconds = takes_s()
    if seconds:
        note_begin()
        time.sleep(seconds)
    note(due)


class Notes:
    """The benchmark's end of the file."""

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
