"""Chooses which lines about single tasks are logged while a process has very many of them."""

from __future__ import annotations

import threading
from zlib import crc32

from delaytasks.core.clock import monotonic
from delaytasks.core.forks import reset_in_child

#: Lines of one event that a process logs in each second. Further ones are for sampled tasks only.
MOST_LINES_PER_S = 100
#: One task in this number of tasks is sampled.
SAMPLED_ONE_OF = 128


class Sampling:
    """Passes the first lines of an event in each second, and then those of sampled tasks.

    The id decides whether a task is sampled, so all processes log all lines of the same tasks.
    Thread-safe; each process counts its own lines.
    """

    def __init__(self) -> None:
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        #: The second, its lines, and the lines left out since the last logged one, by event.
        self._counts: dict[str, tuple[int, int, int]] = {}

    def left_out(self, name: str, id: int | None) -> int | None:
        """Return how many lines of the event were left out before this one.

        The result is None if this line is left out, too.
        """
        now = int(monotonic())
        with self._lock:
            second, lines, skipped = self._counts.get(name, (now, 0, 0))
            lines = lines + 1 if second == now else 1
            is_logged = lines <= MOST_LINES_PER_S or (id is not None and is_sampled(id))
            self._counts[name] = now, lines, 0 if is_logged else skipped + 1
        return skipped if is_logged else None


def is_sampled(id: int) -> bool:
    return crc32(str(id).encode()) % SAMPLED_ONE_OF == 0
