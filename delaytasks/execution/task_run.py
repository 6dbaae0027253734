"""One run of one task, which its processor may complete in a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import InvalidScheduleError, LeaseLostError, NotRunningError
from delaytasks.core.inputs import encode_body
from delaytasks.core.interfaces import ClaimStore, Executor, Transaction
from delaytasks.core.task import DelayTask

#: A result is for looking at, not a place to keep data.
MAX_RESULT_BYTES = 16 * 1024
UnitOf = Callable[[Any, DelayTask], Transaction | None]
#: What is left of a lease, as a part of it, when the processor is told. As long as all is well more than half is left.
LAST_PART = 1 / 3


class LeaseEndsError(LeaseLostError):
    """It is not lost yet, but soon will be, by no fault of the processor's."""


@dataclass(frozen=True)
class LeaseOf:
    """How long this process's rows are its own, as far as it knows without asking the database."""

    lasts_s: float
    #: A row begins no later than so after its claim.
    box_s: float
    #: When the last renewal that came through was asked for, by the monotonic clock.
    renewed_at: Callable[[], float]

    def left_s(self, began: float) -> float:
        """Of a row that began then."""
        return max(began - self.box_s, self.renewed_at()) + self.lasts_s - monotonic()


class TaskRun:
    def __init__(
        self, task: DelayTask, claims: ClaimStore, transaction_of: UnitOf, lease: LeaseOf
    ) -> None:
        self.task = task
        self._claims = claims
        self._unit_of = transaction_of
        self._lease = lease
        self._began = monotonic()
        #: The row is DONE in a transaction of the processor's.
        self.is_written = False
        #: That transaction is committed, or was about to be.
        self.is_committed = False
        #: Nobody can say of a plain connection that its commit came through.
        self.is_certain = False
        self._on: Executor | None = None

    @property
    def is_left_open(self) -> bool:
        """That transaction goes on, and has the row locked."""
        return not self.is_committed and self._on is not None and self._on.in_transaction()

    @property
    def is_rolled_back(self) -> bool:
        """It was written, and is not there."""
        return self.is_written and not self.is_committed and not self.is_left_open

    def complete(self, id: int, session: Any, result: Any) -> None:
        task = self._named(id)
        kept = None if result is None else encode_body(result, MAX_RESULT_BYTES)
        transaction = self._unit_of(session, task)
        if transaction is None:
            raise InvalidScheduleError(
                "complete() takes the session that the effect is written in: session=…"
            )
        with transaction.guard() as self._on:
            if not self._claims.complete(task, kept, self._on):
                raise LeaseLostError(
                    f"task {id} ({task.tag}) is no longer this run's: roll back what it did", id
                )
        self.is_written = True
        transaction.after_commit([task], self._committed)

    def check_lease(self, id: int) -> None:
        task, left_s = self._named(id), self._lease.left_s(self._began)
        if left_s < self._lease.lasts_s * LAST_PART:
            fact = f"the lease of task {id} ({task.tag}) could not be renewed and ends in {max(left_s, 0):.1f} s"
            raise LeaseEndsError(f"{fact}: break off", id)

    def _named(self, id: int) -> DelayTask:
        if id != self.task.id:
            raise NotRunningError(
                f"task {id} does not run here: this is a run of task {self.task.id}", id
            )
        return self.task

    def _committed(self, _tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
        self.is_committed, self.is_certain = True, is_committed
