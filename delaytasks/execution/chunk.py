"""Rows claimed together and settled together; how many they are, and the box of time they share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from delaytasks.core.clock import monotonic
from delaytasks.core.forks import reset_in_child
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask

#: Rows in the first chunk, before anything is known about the processors.
FIRST_SIZE = 10
#: Rows that are brought to a process before that: they keep it at work until the first chunks have told.
FIRST_BROUGHT = 100
#: How much the last chunk says about the next one, if it was as small as the first; a larger one says more.
LEARNING = 0.3
#: In a time box, however quick their processors: to claim and settle them takes time as well.
MOST_CHUNKS = 5


class Chunk:
    """Who starts a row owns it: the runner that takes the next ones, or the time box that takes the rest."""

    def __init__(self, tasks: Sequence[DelayTask], good_for_s: float, box_s: float) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(tasks)
        self._running: set[int] = set()
        self._finished: list[Settlement] = []
        now = monotonic()
        self._good_until = now + good_for_s
        self.box_ends = now + box_s
        self._is_left = False
        #: Held by who settles what is finished.
        self.settling = threading.Lock()

    def next(self) -> DelayTask | None:
        """The next row, or None: at the end, after the time box, and when our leases may be over."""
        try:
            first = self._waiting[0]
        except IndexError:  # the time box takes all of them at once
            return None
        return first if monotonic() <= self._good_until else None

    def start(self, first: DelayTask, most: int = 1) -> list[DelayTask]:
        """That row, and further ones of its tag; none if the time box has taken them meanwhile."""
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
        """Of rows that were started."""
        with self._lock:
            for settlement in settlements:
                self._running.remove(settlement.task.id)
                self._finished.append(settlement)

    def forget(self, tasks: Iterable[DelayTask]) -> None:
        """Started, and never to end."""
        with self._lock:
            for task in tasks:
                self._running.discard(task.id)

    def keep(self, settlements: Iterable[Settlement]) -> None:
        """For who takes what is finished next."""
        with self._lock:
            self._finished.extend(settlements)

    @property
    def is_run(self) -> bool:
        """No row of it runs, or waits to be run."""
        return not self._running and not self._waiting

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self.is_run and not self._finished

    def leave(self) -> bool:
        """Its runner goes, with rows still running; False if there are none."""
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
    """How many rows a chunk is to have: as many as fit the time box, as far as the chunks before it tell."""

    def __init__(self, time_box_s: float, most: int, first: int = FIRST_SIZE) -> None:
        self._time_box_s = time_box_s
        self._most = most
        self._first = first
        self._row_s: float | None = None
        self._wanted = 0

    def learn(self, ran: int, seconds: float, wanted: int = 0) -> None:
        """`wanted` is how many rows the processors could start at once, however long they take for it."""
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
        """What one process runs in a time box, in several chunks if they are quick."""
        fitting = self._first if self._row_s is None else self._time_box_s / max(self._row_s, 1e-6)
        return int(min(max(fitting, self._wanted, 1), self._most * MOST_CHUNKS))

    @property
    def brought(self) -> int:
        """How many rows a process is to have at hand."""
        if self._row_s is not None:
            return self.in_time
        return max(self.in_time, min(FIRST_BROUGHT, self._most * MOST_CHUNKS))

    @property
    def least(self) -> int:
        """So many rows stay together, though other processes may be free."""
        return max(self._wanted, 1)

    @property
    def fits(self) -> bool:
        """Whether even one row does; before any ran that is hoped for."""
        return self._row_s is None or self._row_s < self._time_box_s


class TimeBudget:
    """One thread that calls `expire(chunk)` for each chunk that is open past its time, and again as often as it is
    opened again.

    It needs nothing of the thread that runs the chunk, which may sit in a processor for minutes. While chunks come and
    go it looks once a box whether one is left over, so that nobody has to wake it, and it does not get into the way of
    a processor that is about to begin.
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
        """If it is open already, its box stays."""
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
                    self._changed.wait(
                        min(left, self._box_s)
                    )  # what is opened meanwhile may be earlier
                    continue
                del self._open[chunk]
            try:
                self._expire(chunk)
            except Exception as error:  # other chunks need this thread
                self._on_error(error)

    def _rest(self) -> None:
        opened = self._opened
        self._changed.wait(self._box_s)  # what is opened meanwhile is not over before
        if self._opened == opened:
            self._is_asleep = True
            self._changed.wait()
            self._is_asleep = False
