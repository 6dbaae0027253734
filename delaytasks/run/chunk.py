"""Chunks: rows that are claimed and settled together, within one time budget."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from delaytasks.model.clock import monotonic, reset_in_child
from delaytasks.model.task import DelayedTask, Settlement


class Chunk:
    """The rows of one claim. Each row waits first; then it runs, has ended, and is settled:

        from      method                              to
        waiting   `start`: its run begins             running
        waiting   `give_back`: it will not run here   ended
        running   `end`: its run has a settlement     ended
        running   `forget`: its process ends          (abandoned)
        ended     `take_finished`: it is settled      (left)
        (left)    `keep`: it could not be settled     ended

    The thread of the runner starts rows, and the thread of the time budget gives back the rows that
    still wait when the time is over.
    """

    def __init__(self, tasks: Sequence[DelayedTask], lease_left_s: float, budget_s: float) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(tasks)
        self._running: set[int] = set()
        self._finished: list[Settlement] = []
        self._returned: list[DelayedTask] = []
        now = monotonic()
        self._leases_end_at = now + lease_left_s
        self.budget_ends = now + budget_s
        self._is_detached = False
        #: Locked while the ended rows are settled.
        self.settling = threading.Lock()

    def next(self) -> DelayedTask | None:
        """Return the next waiting row, or None if no row waits or the leases may have ended."""
        try:
            first = self._waiting[0]
        except IndexError:  # the time budget may take all of them meanwhile
            return None
        return first if monotonic() <= self._leases_end_at else None

    def start(self, first: DelayedTask, most: int = 1) -> list[DelayedTask]:
        """Start `first`, and up to `most` rows of its tag together.

        Return the started rows; none if the time budget has given `first` back meanwhile.
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

    def forget(self, tasks: Iterable[DelayedTask]) -> None:
        """Remove started rows that get no settlement."""
        with self._lock:
            for task in tasks:
                self._running.discard(task.id)

    def keep(self, settlements: Iterable[Settlement]) -> None:
        """Add settlements for the next call of `take_finished`."""
        with self._lock:
            self._finished.extend(settlements)

    @property
    def is_done(self) -> bool:
        """Whether no row runs or waits."""
        return not self._running and not self._waiting

    @property
    def is_settled(self) -> bool:
        with self._lock:
            return self.is_done and not self._finished

    def detach(self, even_if_done: bool = False) -> bool:
        """Record that the runner goes on to another chunk while rows still run.

        Return False if none runs. With `even_if_done` the chunk is detached all the same.
        """
        with self._lock:
            self._is_detached = even_if_done or bool(self._running)
            return self._is_detached

    @property
    def is_detached(self) -> bool:
        return self._is_detached

    @property
    def waiting(self) -> list[DelayedTask]:
        with self._lock:
            return list(self._waiting)

    @property
    def returned(self) -> list[DelayedTask]:
        """The rows that were given back."""
        return list(self._returned)

    @property
    def running(self) -> list[int]:
        with self._lock:
            return list(self._running)

    def take_finished(self) -> list[Settlement]:
        with self._lock:
            finished, self._finished = self._finished, []
            return finished

    def give_back(self) -> int:
        """Settle the waiting rows as given back, and return their number."""
        if not self._waiting:  # as nearly always; rows never begin to wait again
            return 0
        with self._lock:
            returned = list(self._waiting)
            self._finished.extend(Settlement(task, "give_back") for task in returned)
            self._returned += returned
            self._waiting.clear()
            return len(returned)


class TimeBudget:
    """A thread that calls `expire(chunk)` for each chunk that is open after its time budget.

    The thread that runs the chunk may be in a processor for minutes, so it takes no part in this.
    While chunks are opened and closed, this thread wakes once in a time budget by itself, and no
    runner spends time on waking it.
    """

    def __init__(
        self,
        budget_s: float,
        expire: Callable[[Chunk], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._budget_s = budget_s
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
        """Open a chunk; a chunk that is open keeps its time budget."""
        with self._changed:
            self._open.setdefault(chunk, monotonic() + self._budget_s + rest_s)
            self._opened += 1
            self._start()
            if self._is_asleep:
                self._changed.notify()

    def end_now(self, chunk: Chunk) -> None:
        """Let the thread call `expire(chunk)` as soon as possible."""
        with self._changed:
            self._open[chunk] = monotonic()
            self._opened += 1
            self._start()
            self._changed.notify()

    def close(self, chunk: Chunk) -> None:
        if chunk in self._open:  # a chunk of a single row need not be open
            with self._changed:
                self._open.pop(chunk, None)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            name = "delaytasks-time-budget"
            self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
            self._thread.start()

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
                    self._changed.wait(min(left, self._budget_s))
                    continue
                del self._open[chunk]
            try:
                self._expire(chunk)
            except Exception as error:  # the thread goes on for the other chunks
                self._on_error(error)

    def _rest(self) -> None:
        opened = self._opened
        # A chunk that is opened meanwhile does not expire earlier.
        self._changed.wait(self._budget_s)
        if self._opened == opened:
            self._is_asleep = True
            self._changed.wait()
            self._is_asleep = False
