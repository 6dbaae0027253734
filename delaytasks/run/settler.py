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


#: The time between two tries while the database is unavailable.
SETTLE_RETRY_S = 0.5
#: The database gave no answer, or another transaction has locked a row.
_AWAY = (StoreUnavailableError, OutcomeUnknownError)
LOCKED_REMEDY = (
    "an open transaction has locked this task's row (with SQLite: the database); if its processor "
    "began the transaction, commit or roll back before the processor returns"
)


def is_locked(error: StoreError) -> bool:
    """Whether an open transaction has locked a row, so that the database works nevertheless."""
    return isinstance(error, StoreUnavailableError) and error.is_locked


class Settler:
    def __init__(self, runtime: Runtime, claims: Claims, observers: list[Observer]) -> None:
        self._runtime, self._events = runtime, runtime.events
        self._claims, self._observers = claims, observers

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
        except StoreError as error:
            if isinstance(error, _AWAY) and not is_locked(error):
                chunk.keep(settlements)
                raise
            # The database refused one of them, or a row is locked. The others do not run again.
            self._settle_each(chunk, settlements, deadline)

    def _repeat(
        self, settlements: Sequence[Settlement], deadline: float, settle: Settle
    ) -> set[int]:
        """Write settlements, with retries until the deadline; the fence makes retries safe."""
        while True:
            try:
                return settle(settlements)
            except _AWAY as error:
                if is_locked(error):
                    raise
                self._events.emit("settle.waits", error=str(error), cause=error)
                if monotonic() > deadline:
                    raise
                time.sleep(SETTLE_RETRY_S)
                settle = self._claims.settle

    def _settle_each(
        self, chunk: Chunk, settlements: Sequence[Settlement], deadline: float
    ) -> None:
        """Settle each row by itself, and try locked rows again until the deadline."""
        refusal: StoreError | None = None
        lock: StoreError | None = None
        while settlements:
            locked: list[Settlement] = []
            for number, one in enumerate(settlements):
                try:
                    self._report([one], self._claims.settle([one]))
                except _AWAY as error:
                    if not is_locked(error):
                        chunk.keep([*locked, *settlements[number:]])
                        raise
                    self._events.emit(
                        "task.row_locked", **one.task.event_fields, remedy=LOCKED_REMEDY
                    )
                    locked.append(one)
                    lock = error
                except StoreError as error:
                    chunk.keep([one])
                    refusal = error
            if lock is not None and locked and monotonic() > deadline:
                chunk.keep(locked)
                raise lock
            settlements = locked
        if refusal is not None:
            raise refusal

    # -- reports ----------------------------------------------------------------------------------

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
