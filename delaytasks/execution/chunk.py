"""Chunks: rows that are claimed and settled together, within one time box."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from delaytasks.core.clock import monotonic
from delaytasks.core.forks import reset_in_child
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask

#: Rows of the first chunk, before the speed of the processors is known.
FIRST_SIZE = 10
#: Rows that a process gets before that, so that it stays busy until the first chunks are measured.
FIRST_BROUGHT = 100
#: The weight of the last chunk in the estimate, if it was as small as the first; a larger chunk
#: weighs more.
LEARNING = 0.3
#: The most full chunks in one time box, since claims and settlements take time as well.
MOST_CHUNKS = 5


class Chunk:
    """Rows that wait, run or have ended.

    Both the runner and the time box take waiting rows; the one that takes a row settles it.
    """

    def __init__(self, tasks: Sequence[DelayTask], good_for_s: float, box_s: float) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(tasks)
        self._running: set[int] = set()
        self._finished: list[Settlement] = []
        now = monotonic()
        self._good_until = now + good_for_s
        self.box_ends = now + box_s
        self._is_left = False
        #: Held while the ended rows are settled.
        self.settling = threading.Lock()

    def next(self) -> DelayTask | None:
        """Return the next row, or None if no row waits or the leases may be over."""
        try:
            first = self._waiting[0]
        except IndexError:  # the time box may take all of them meanwhile
            return None
        return first if monotonic() <= self._good_until else None

    def start(self, first: DelayTask, most: int = 1) -> list[DelayTask]:
        """Start that row and further ones of its tag.

        Return none if the time box has taken the row.
        """
        with self._lock:
            if not self._waiting or self._waiting[0] is not first:
                return []
            if most == 1:
                self._running.add(self._waiting.popleft().id)
                return [first]
            started = [task for task in self._waiting if task.tag == first.tag][:most]
            ids = {task.id for task in started}
            self._waiting = deque(task for task in self._waiting if task.id not in ids)
            self._running |= ids
            return started

    def end(self, settlements: Iterable[Settlement]) -> None:
        """Record the settlements of started rows."""
        with self._lock:
            for settlement in settlements:
                self._running.remove(settlement.task.id)
                self._finished.append(settlement)

    def forget(self, tasks: Iterable[DelayTask]) -> None:
        """Remove started rows that get no settlement."""
        with self._lock:
            for task in tasks:
                self._running.discard(task.id)

    def keep(self, settlements: Iterable[Settlement]) -> None:
        """Add settlements for the next call of `take_finished`."""
        with self._lock:
            self._finished.extend(settlements)

    @property
    def is_run(self) -> bool:
        """Whether no row runs or waits."""
        return not self._running and not self._waiting

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self.is_run and not self._finished

    def leave(self) -> bool:
        """Record that the runner goes on to another chunk; return whether rows still run."""
        with self._lock:
            self._is_left = bool(self._running)
            return self._is_left

    @property
    def is_left(self) -> bool:
        return self._is_left

    @property
    def running(self) -> list[int]:
        with self._lock:
            return list(self._running)

    def take_finished(self) -> list[Settlement]:
        with self._lock:
            finished, self._finished = self._finished, []
            return finished

    def take_waiting(self) -> list[DelayTask]:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
            return waiting


class ChunkSize:
    """Estimates from past chunks how many rows fit the time box."""

    def __init__(self, time_box_s: float, most: int, first: int = FIRST_SIZE) -> None:
        self._time_box_s = time_box_s
        self._most = most
        self._first = first
        self._row_s: float | None = None
        self._wanted = 0

    def learn(self, ran: int, seconds: float, wanted: int = 0) -> None:
        """Learn from a chunk.

        `wanted` is the number of rows that its processors can start simultaneously.
        """
        if ran or wanted:
            self._wanted = min(wanted, self._most)
        if ran:
            row_s = seconds / ran
            known = row_s if self._row_s is None else self._row_s
            self._row_s = known + (1 - (1 - LEARNING) ** max(ran / FIRST_SIZE, 1)) * (row_s - known)

    @property
    def rows(self) -> int:
        return min(self.in_time, self._most)

    @property
    def in_time(self) -> int:
        """The rows that one process runs in a time box, in several chunks if they are short."""
        fitting = self._first if self._row_s is None else self._time_box_s / max(self._row_s, 1e-6)
        return int(min(max(fitting, self._wanted, 1), self._most * MOST_CHUNKS))

    @property
    def brought(self) -> int:
        """The rows that a process should have at hand."""
        if self._row_s is not None:
            return self.in_time
        return max(self.in_time, min(FIRST_BROUGHT, self._most * MOST_CHUNKS))

    @property
    def least(self) -> int:
        """The rows that stay together although other processes may be idle."""
        return max(self._wanted, 1)

    @property
    def fits(self) -> bool:
        """Whether one row fits the time box; assumed until the first row has run."""
        return self._row_s is None or self._row_s < self._time_box_s


class TimeBudget:
    """A thread that calls `expire(chunk)` for each chunk that is open after its time box.

    The thread that runs the chunk may be in a processor for minutes, so it takes no part in this.
    While chunks are opened and closed, this thread wakes once in a time box by itself, and no
    runner spends time on waking it.
    """

    def __init__(
        self, box_s: float, expire: Callable[[Chunk], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._box_s = box_s
        self._expire = expire
        self._on_error = on_error
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[Chunk, float] = {}
        self._opened = 0
        self._is_asleep = False
        self._thread: threading.Thread | None = None

    def open(self, chunk: Chunk, rest_s: float = 0.0) -> None:
        """Open a chunk; a chunk that is open keeps its time box."""
        with self._changed:
            self._open.setdefault(chunk, monotonic() + self._box_s + rest_s)
            self._opened += 1
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._watch, name="delaytasks-timebox", daemon=True
                )
                self._thread.start()
            elif self._is_asleep:
                self._changed.notify()

    def close(self, chunk: Chunk) -> None:
        with self._changed:
            self._open.pop(chunk, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    self._rest()
                    continue
                chunk, deadline = min(self._open.items(), key=itemgetter(1))
                left = deadline - monotonic()
                if left > 0:
                    # A chunk that is opened meanwhile may expire earlier.
                    self._changed.wait(min(left, self._box_s))
                    continue
                del self._open[chunk]
            try:
                self._expire(chunk)
            except Exception as error:  # the thread goes on for the other chunks
                self._on_error(error)

    def _rest(self) -> None:
        opened = self._opened
        self._changed.wait(self._box_s)  # a chunk that is opened meanwhile does not expire earlier
        if self._opened == opened:
            self._is_asleep = True
            self._changed.wait()
            self._is_asleep = False
