"""Settles the rows of a chunk together, and counts the runs for the statistics."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.model.clock import monotonic, reset_in_child, to_us
from delaytasks.model.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.model.moves import MOVES, Status, following
from delaytasks.model.task import DelayedTask, Entry, Settle, Settlement
from delaytasks.registry import Registry
from delaytasks.run.chunk import Chunk
from delaytasks.run.run_counts import (
    LOST_LEASE,
    OUTCOMES,
    FailureCount,
    RunCounts,
    RunStatistics,
    error_pattern,
)

if TYPE_CHECKING:
    from delaytasks.db.claims import Claims
    from delaytasks.runtime import Runtime


# -- Counts what one process runs, for the statistics of its worker -------------------------------


#: The most groups of failures in one report. Further ones are counted as outcomes only.
MAX_FAILURE_GROUPS = 20
#: The longest error text of a group.
MAX_SAMPLE = 2000

_FAILURES = {name for name, move in MOVES.items() if move.ending and move.ending.is_failure}


class RunCounter:
    """Counts the runs of one runner until `take` returns the counts for a report.

    Several threads may run and settle tasks. A run is only added to a queue, without a lock, and
    the lock is taken once for the settlements of a chunk.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[tuple[str, timedelta, float]] = deque()
        self._tags: dict[str, RunCounts] = {}
        self._failures: dict[tuple[str, str], FailureCount] = {}

    def add_run(self, task: DelayedTask, began: datetime, duration_s: float) -> None:
        """Count a run that has ended, and that began at `began`."""
        self._runs.append((task.tag, began - task.due, duration_s))

    def add_settlements(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """Count the outcomes of runs. `accepted` are the ids whose settlement changed a row."""
        done: dict[str, int] = {}
        with self._lock:
            for settlement in settlements:
                task = settlement.task
                if settlement.move == "succeed" and task.id in accepted:
                    tag = task.tag
                    done[tag] = done.get(tag, 0) + 1
                else:
                    self._add_outcome(settlement, task.id in accepted)
            for tag, number in done.items():
                self._of(tag).add_outcome(OUTCOMES["succeed"], number)

    def take(self) -> RunStatistics:
        """Return the counts since the last call, and count anew."""
        with self._lock:
            self._add_runs()
            if not self._tags:
                return RunStatistics()
            tags, self._tags = self._tags, {}
            failures, self._failures = self._failures, {}
        return RunStatistics(
            tuple((tag, counts.as_list()) for tag, counts in tags.items()), tuple(failures.values())
        )

    def _add_runs(self) -> None:
        """Add the runs of the queue to the counts of their tags."""
        runs, last, counts, on_time_s = self._runs, "", None, None
        for _ in range(len(runs)):
            tag, lateness, duration_s = runs.popleft()
            if counts is None or tag != last:  # most neighbours have the same tag
                last, counts, on_time_s = tag, self._of(tag), self._on_time_s(tag)
            counts.add_run(lateness.total_seconds(), duration_s, on_time_s)

    def _add_outcome(self, settlement: Settlement, is_accepted: bool) -> None:
        task, move = settlement.task, settlement.move
        counts = self._of(task.tag)
        # A transaction of the processor that is still open keeps the row until its lease ends.
        is_left_open = settlement.is_made and move != "succeed"
        if is_left_open or not is_accepted:
            counts.add_outcome(LOST_LEASE)
            return
        counts.add_outcome(OUTCOMES[move])
        if move in _FAILURES:
            self._add_failure(task, settlement.error or "")
        elif move == "expire" and self._on_time_s(task.tag) is not None:
            counts.late += 1

    def _of(self, tag: str) -> RunCounts:
        counts = self._tags.get(tag)
        if counts is None:
            counts = self._tags[tag] = RunCounts()
        return counts

    def _on_time_s(self, tag: str) -> float | None:
        processor = self._registry.get(tag)
        return None if processor is None else processor.on_time_s

    def _add_failure(self, task: DelayedTask, error: str) -> None:
        pattern = error_pattern(error)
        known = self._failures.get((task.tag, pattern))
        if known is not None:
            self._failures[task.tag, pattern] = known._replace(runs=known.runs + 1)
        elif len(self._failures) < MAX_FAILURE_GROUPS:
            self._failures[task.tag, pattern] = FailureCount(
                task.tag, pattern, 1, task.id, error[-MAX_SAMPLE:]
            )


#: After this number of locked rows the other rows are settled first, since each try takes seconds.
MAX_LOCKED = 3
#: The time between two tries while the database is unavailable.
SETTLE_RETRY_S = 0.5


def is_locked(error: StoreError) -> bool:
    """Whether the database answers, and an open transaction has locked a row."""
    return isinstance(error, StoreUnavailableError) and error.is_locked


class Settler:
    def __init__(self, runtime: Runtime, claims: Claims, counter: RunCounter | None) -> None:
        self._settings, self._clock = runtime.settings, runtime.clock
        self._timer, self._events = runtime.timer, runtime.events
        self._claims, self._counter = claims, counter
        #: Id and version of the last locked row that was reported.
        self._reported_locked: tuple[int, int] | None = None

    def settle(self, chunk: Chunk, patience_s: float, settle: Settle | None = None) -> bool:
        """Settle the rows of a chunk that have ended, and arm those that run again.

        While the database is unavailable, settling is repeated for `patience_s`; the chunk keeps
        what could not be settled. `settle` is used in the first try, and the store's function in
        further ones. With `patience_s=0`, return False if another thread settles the chunk now.
        """
        if not chunk.settling.acquire(blocking=patience_s > 0):
            return False
        try:
            self._settle(chunk, patience_s, settle or self._claims.settle)
        finally:
            chunk.settling.release()
        return True

    def _settle(self, chunk: Chunk, patience_s: float, settle: Settle) -> None:
        finished = chunk.take_finished()
        if made := [s for s in finished if s.is_made]:
            self._report(made, {s.task.id for s in made})
        settlements = [s for s in finished if not s.is_made]
        deadline = monotonic() + patience_s
        try:
            if settlements:
                self._report(settlements, self._repeat(settlements, deadline, settle))
        except (StoreUnavailableError, OutcomeUnknownError) as error:
            if len(settlements) > 1 and is_locked(error):
                self._settle_each(chunk, settlements, deadline)
                return
            chunk.keep(settlements)
            raise
        except StoreError:
            # The database refused one of them. The others are settled and do not run again.
            self._settle_each(chunk, settlements, deadline)

    def _settle_each(
        self, chunk: Chunk, settlements: Sequence[Settlement], deadline: float
    ) -> None:
        """Settle each row by itself; locked rows come last, so that no other row waits for them."""
        refusal: StoreError | None = None
        locked: list[Settlement] = []
        untried: list[Settlement] = []
        for number, one in enumerate(settlements):
            try:
                if len(locked) < MAX_LOCKED:
                    self._report([one], self._write([one], self._claims.settle))
                else:
                    untried.append(one)
            except (StoreUnavailableError, OutcomeUnknownError) as error:
                if not is_locked(error):
                    chunk.keep([*locked, *untried, *settlements[number:]])
                    raise
                locked.append(one)
            except StoreError as error:
                chunk.keep([one])
                refusal = error
        later = [*untried, *locked]
        for number, one in enumerate(later):
            try:
                self._report([one], self._repeat([one], deadline, self._claims.settle))
            except StoreError:
                chunk.keep(later[number:])
                raise
        if refusal is not None:
            raise refusal

    def _repeat(
        self, settlements: Sequence[Settlement], deadline: float, settle: Settle
    ) -> set[int]:
        """Write settlements, with retries until the deadline; the fence makes retries safe."""
        while True:
            try:
                return self._write(settlements, settle)
            except (StoreUnavailableError, OutcomeUnknownError) as error:
                if is_locked(error) and len(settlements) > 1:
                    raise
                if is_locked(error):
                    self._report_locked(settlements[0].task)
                self._events.emit("settle.waits", error=str(error), cause=error)
                if monotonic() > deadline:
                    raise
                time.sleep(SETTLE_RETRY_S)
                settle = self._claims.settle

    @staticmethod
    def _write(settlements: Sequence[Settlement], settle: Settle) -> set[int]:
        """Write settlements; an error with characters that the database refuses becomes ASCII."""
        try:
            return settle(settlements)
        except (StoreUnavailableError, OutcomeUnknownError):
            raise
        except StoreError:
            text = settlements[0].error
            if len(settlements) > 1 or text is None or text.isascii():
                raise
            plain = text.encode("ascii", "backslashreplace").decode()
            return settle([settlements[0]._replace(error=plain)])

    # -- reports ----------------------------------------------------------------------------------

    def _report_locked(self, task: DelayedTask) -> None:
        """Report a locked row once, not at each try."""
        if self._reported_locked == (task.id, task.version):
            return
        self._reported_locked = task.id, task.version
        remedy = (
            "an open transaction has locked this task's row (with SQLite: the database); if its "
            "processor began the transaction, commit or roll back before the processor returns"
        )
        self._events.emit("task.row_locked", **task.event_fields, remedy=remedy)

    def _report(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """Report which settlements were accepted, and arm the tasks that run again."""
        if self._counter is not None:
            self._counter.add_settlements(settlements, accepted)
        done = [s for s in settlements if s.move == "succeed" and s.task.id in accepted]
        if done:
            self._events.emit("task.succeeded", count=len(done))
            if self._settings.has_structured_log:
                self._report_each(done)
        for s in settlements:
            if s.task.id not in accepted:
                self._events.emit("task.lease_lost", **s.task.event_fields)
        again = (s for s in settlements if s.target is Status.NOT_COMPLETE)
        self._arm_again([s for s in again if s.task.id in accepted])

    def _report_each(self, done: Sequence[Settlement]) -> None:
        for s in done:
            self._events.emit(
                "task.done",
                **s.task.event_fields,
                attempt=s.task.runs,
                late_s=((s.began or s.task.due) - s.task.due).total_seconds(),
            )

    def _arm_again(self, settlements: Sequence[Settlement]) -> None:
        """Arm the tasks that are due within the horizon."""
        if not settlements:
            return
        horizon = self._clock.now_us() + (self._settings.horizon_s or 1e9) * 1e6
        entries = [
            Entry(
                s.task.id,
                following(s.task.version),
                to_us(s.expected_time or s.task.expected_time),
                s.task.queue,
                s.task.priority,
            )
            for s in settlements
        ]
        near = [entry for entry in entries if entry.due_us <= horizon]
        if near:
            self._timer.arm(near)
