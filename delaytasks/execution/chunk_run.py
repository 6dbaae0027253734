"""Chunks on their way: their rows run one after another, as batches, or side by side, and are settled as they end.

A chunk waits for its rows for as long as its time box. What still runs then side by side with others goes on by
itself, and the runner takes the next chunk as soon as there are places for it: who waits for long holds up no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.errors import OutcomeUnknownError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Settlement
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask
from delaytasks.execution.admission import Admission
from delaytasks.execution.chunk import Chunk, TimeBudget
from delaytasks.execution.concurrent_calls import ConcurrentCalls
from delaytasks.execution.executor import TaskExecutor
from delaytasks.execution.settler import Settle, Settler
from delaytasks.processors.registry import Processor, Registry
from delaytasks.processors.thread_slots import ThreadSlots

#: Holds the surroundings of rows that a thread runs one after another.
Kept = Callable[[], AbstractContextManager[object]]
#: A row that may end this process waits so long, as a part of the lease, for those that run side by side to end.
ALONE = 0.25
#: Between two tries to settle while the database is away.
REST_S = 1.0


@dataclass(slots=True)
class Tally:
    """What a runner has done, of one chunk or several."""

    claimed: int = 0
    #: Rows that ended, and the time of the process that they took.
    ran: int = 0
    seconds: float = 0.0
    #: Rows that the next chunk should have, for who takes many at once, and rows that said so.
    wanted: int = 0
    wanting: int = 0
    started: int = 0

    def start(self, rows: int, wanted: int = 0) -> None:
        self.started += rows
        if wanted:
            self.wanted, self.wanting = max(self.wanted, wanted), self.wanting + rows

    def add(self, ran: int, seconds: float) -> None:
        self.ran += ran
        self.seconds += seconds


class ChunkRun:
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        registry: Registry,
        running: TaskExecutor,
        settling: Settler,
        thread_slots: ThreadSlots,
        admission: Admission | None,
        events: Events,
        kept: Kept,
    ) -> None:
        self._kept = kept
        self._lease_s = settings.lease_s
        self._box_s = settings.chunk_time_box_s
        self._clock = clock
        self._registry = registry
        self._time_limits = registry.time_limits
        self._running = running
        self._settling = settling
        self._thread_slots = thread_slots
        self._admission = admission
        self._events = events
        self._time_box = TimeBudget(
            self._box_s, self._look_after, partial(self._failed, "time box")
        )
        self._beside = ConcurrentCalls(
            thread_slots, running, self._open_again, partial(self._failed, "side by side")
        )
        #: Whose runner has gone on.
        self._left: set[Chunk] = set()

    def run(
        self,
        tasks: Sequence[DelayTask],
        claimed_at: float,
        tally: Tally,
        may_leave: bool,
        settle: Settle | None = None,
    ) -> None:
        """Returns when all rows have ended; with `may_leave` when all but such as run side by side have. `settle` is
        how to settle them."""
        if not tasks:
            return
        tally.claimed += len(tasks)
        refused: Sequence[Settlement] = ()
        if self._admission is not None:
            tasks, refused = self._admission.admit(tasks)
            if not tasks and not refused:
                return
        claimed = self._clock.now()
        self._events.emit("chunk.claimed", count=len(tasks))
        chunk = Chunk(self._in_turn(tasks), self._lease_s - (monotonic() - claimed_at), self._box_s)
        chunk.keep(refused)
        self._time_box.open(chunk)
        try:
            with self._kept():
                flying = self._start_all(chunk, claimed, tally)
            if flying:
                self._beside.wait(chunk, flying, self._box_s if may_leave else None)
                tally.wanted = max(
                    tally.wanted, *(self._beside.free_rows(processor) for processor in flying)
                )
        finally:
            if chunk.leave():
                self._left.add(chunk)
                self._time_box.open(chunk)
            else:
                self._time_box.close(chunk)
            try:
                self._settling.settle(chunk, self._lease_s, settle)
            finally:
                self._flush()

    def run_alone(self, task: DelayTask, claimed_at: float, tally: Tally) -> None:
        """A row that may kill this process: those of other chunks should not be there."""
        self._be_alone(lambda: not self._left)
        self.run([task], claimed_at, tally, may_leave=False)

    def _be_alone(self, is_so: Callable[[], bool]) -> None:
        self._thread_slots.wait(is_so, monotonic() + ALONE * self._lease_s)

    @property
    def left(self) -> tuple[int, ...]:
        """The ids of rows that run, though their chunk's runner has gone on."""
        return tuple(id for chunk in list(self._left) for id in chunk.running)

    def finish(self) -> None:
        """Waits for them, and for their settlements."""
        self._thread_slots.wait(lambda: not self._left)

    def ended(self) -> tuple[int, float]:
        """Rows that ended side by side with others since this was asked last, and the time that they took."""
        return self._thread_slots.ended()

    # -- start ------------------------------------------------------------------------------------

    def _in_turn(self, tasks: Sequence[DelayTask]) -> Sequence[DelayTask]:
        """First those that run side by side and have a place, since they wait while the others run; last those that may
        take this process with them, so that nothing is at stake but themselves."""
        if not any(self._is_special(tag) for tag in {task.tag for task in tasks}):
            return tasks
        free: dict[str, int] = {}
        flying: list[DelayTask] = []
        others: list[DelayTask] = []
        limited: list[DelayTask] = []
        for task in tasks:
            processor = self._registry.get(task.tag)
            if processor is None or processor.in_flight is None:
                (limited if task.tag in self._time_limits else others).append(task)
                continue
            if task.tag not in free:
                free[task.tag] = self._beside.free_rows(processor)
            free[task.tag] -= 1
            (flying if free[task.tag] >= 0 else others).append(task)
        return [*flying, *others, *limited]

    def _is_special(self, tag: str) -> bool:
        processor = self._registry.get(tag)
        return processor is not None and (
            processor.in_flight is not None or processor.has_time_limits
        )

    def _start_all(self, chunk: Chunk, claimed: datetime, tally: Tally) -> list[Processor]:
        """Returns the processors whose calls run side by side."""
        flying: dict[str, Processor] = {}
        began, waited_s = monotonic(), 0.0
        while (first := chunk.next()) is not None:
            processor = self._registry.get(first.tag)
            most = 1 if processor is None else processor.batch or 1
            if processor is not None and processor.in_flight is not None:
                flying[first.tag] = processor
                since = monotonic()
                rows = self._beside.start(chunk, processor, first, most, claimed)
                if rows is None:
                    break
                if rows:
                    tally.start(rows, most)
                waited_s += monotonic() - since
            elif tasks := chunk.start(first, most):
                if self._time_limits and first.tag in self._time_limits:
                    waited_s += self._make_safe(chunk, tasks)
                self._run(chunk, processor, tasks, claimed)
                tally.start(len(tasks), most if most > 1 else 0)
                tally.ran += len(tasks)
        tally.seconds += monotonic() - began - waited_s
        return list(flying.values())

    def _run(
        self, chunk: Chunk, processor: Processor | None, tasks: list[DelayTask], claimed: datetime
    ) -> None:
        """In this thread."""
        try:
            chunk.end(self._running.run(processor, tasks, claimed))
        except BaseException:
            chunk.forget(tasks)  # told to stop: they lapse
            raise

    def _make_safe(self, chunk: Chunk, tasks: list[DelayTask]) -> float:
        """For rows that may take this process with them: nobody else should be there, and what is finished is settled
        before they begin. Returns how long that took."""
        began = monotonic()
        try:
            self._be_alone(lambda: not self._left and len(chunk.running) == len(tasks))
            self._settling.settle_finished(chunk, patience_s=self._lease_s)
        except BaseException:
            chunk.end(Settlement(task, "give_back") for task in tasks)
            raise
        return monotonic() - began

    # -- the time box -----------------------------------------------------------------------------

    def _look_after(self, chunk: Chunk) -> None:
        """The time box is over: what is finished is settled, what did not start goes to other workers at once."""
        waiting = chunk.take_waiting()
        chunk.keep(Settlement(task, "give_back", error=None) for task in waiting)
        if waiting:
            self._events.emit("chunk.gave_back", count=len(waiting))
        try:
            if not self._settling.settle(chunk, patience_s=0):
                self._time_box.open(chunk)
        except (StoreUnavailableError, OutcomeUnknownError):
            if not chunk.is_left:
                raise
            # For as long as it takes: if the leases end meanwhile, the fence refuses what comes too late.
            self._time_box.open(chunk, rest_s=REST_S)
        except BaseException:
            if chunk.is_left:
                chunk.take_finished()  # they are refused: they lapse
            raise
        finally:
            if chunk.is_over:
                self._forget(chunk)
            self._flush()  # whoever watches sees the row that is still running

    def _open_again(self, chunk: Chunk) -> None:
        """Its runner may have gone on: then only the time box settles what ends."""
        self._time_box.open(chunk)

    def _forget(self, chunk: Chunk) -> None:
        if chunk.is_left:
            self._left.discard(chunk)
            self._thread_slots.tell()

    def _failed(self, what: str, error: Exception) -> None:
        self._events.emit(
            "loop.failed", loop=what, error=f"{type(error).__name__}: {error}", cause=error
        )

    def _flush(self) -> None:
        if self._running.watcher is not None:
            self._running.watcher.flush()
