"""Settles the rows of a chunk together, and tells the observers what became of them.

A settlement says how a row leaves the status RUNNING. The settlements of a chunk are written in one
statement, which names the version of each row: a row that another worker has recovered meanwhile
keeps its state, and so a repeated settlement is safe. While the database is unavailable, settling
is repeated. If the database refuses the statement, or another transaction has locked a row, each
row is settled by itself. Rows that run again are armed afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from delaytasks.model.clock import monotonic, to_us
from delaytasks.model.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.model.moves import Status, following
from delaytasks.model.task import DelayedTask, Entry, Settle, Settlement

if TYPE_CHECKING:
    from delaytasks.db.claims import Claims
    from delaytasks.events import Events
    from delaytasks.run.chunk import Chunk
    from delaytasks.runtime import Runtime


# -- What observes the runs of a process: statistics, the structured log, events of Celery --------


class Observer:
    """Sees what becomes of the rows that a process has claimed. Its methods must not raise."""

    def started(self, task: DelayedTask, claimed: datetime, began: datetime) -> None:
        """The processor is about to be called."""

    def ended(self, settlement: Settlement, took_s: float, error: BaseException | None) -> None:
        """The processor has returned, or has raised the error."""

    def not_called(self, settlement: Settlement, claimed: datetime) -> None:
        """The row has expired, or this process cannot run it."""

    def settled(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """The settlements were written. `accepted` are the ids of the rows that they changed."""

    def flush(self) -> None:
        """A chunk has ended, or its time budget is over: send what was observed."""


class RunLog(Observer):
    """Writes the lines of single runs, if the log is structured."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def started(self, task: DelayedTask, claimed: datetime, began: datetime) -> None:
        self._events.emit("task.started", **task.event_fields, began=began)

    def settled(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        for s in settlements:
            if s.move == "succeed" and s.task.id in accepted:
                late_s = ((s.began or s.task.due) - s.task.due).total_seconds()
                fields = s.task.event_fields
                self._events.emit("task.done", **fields, attempt=s.task.runs, late_s=late_s)


# -- Settlements, with retries --------------------------------------------------------------------


#: After this number of locked rows the other rows are settled first, since each try takes seconds.
MAX_LOCKED = 3
#: The time between two tries while the database is unavailable.
SETTLE_RETRY_S = 0.5


def is_locked(error: StoreError) -> bool:
    """Whether the database answers, and an open transaction has locked a row."""
    return isinstance(error, StoreUnavailableError) and error.is_locked


class Settler:
    def __init__(self, runtime: Runtime, claims: Claims, observers: list[Observer]) -> None:
        self._runtime, self._events = runtime, runtime.events
        self._claims, self._observers = claims, observers
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
            finished = chunk.take_finished()
            made = [one for one in finished if one.is_made]
            if made:
                self._report(made, {one.task.id for one in made})
                finished = [one for one in finished if not one.is_made]
            if finished:
                deadline = monotonic() + patience_s
                self._settle(chunk, finished, deadline, settle or self._claims.settle)
        finally:
            chunk.settling.release()
        return True

    def _settle(
        self, chunk: Chunk, settlements: Sequence[Settlement], deadline: float, settle: Settle
    ) -> None:
        try:
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
            if len(locked) >= MAX_LOCKED:
                untried.append(one)
                continue
            try:
                self._report([one], self._write([one], self._claims.settle))
            except (StoreUnavailableError, OutcomeUnknownError) as error:
                if not is_locked(error):
                    chunk.keep([*locked, *settlements[number:]])
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
                if is_locked(error):
                    if len(settlements) > 1:
                        raise
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
        for observer in self._observers:
            observer.settled(settlements, accepted)
        done, again = 0, list[Settlement]()
        for s in settlements:
            if s.task.id not in accepted:
                self._events.emit("task.lease_lost", **s.task.event_fields)
            elif s.move == "succeed":
                done += 1
            elif s.target is Status.NOT_COMPLETE:
                again.append(s)
        if done:
            self._events.emit("task.succeeded", count=done)
        if again:
            self._arm_again(again)

    def _arm_again(self, settlements: Sequence[Settlement]) -> None:
        """Arm the tasks that are due within the horizon."""
        now_us, horizon_s = self._runtime.clock.now_us(), self._runtime.settings.horizon_s or 1e9
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
        near = [entry for entry in entries if entry.due_us <= now_us + horizon_s * 1e6]
        if near:
            self._runtime.timer.arm(near)
