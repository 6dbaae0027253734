"""One run of one task: its lease, and its completion in the processor's own transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delaytasks.core.body import encode_body
from delaytasks.core.clock import monotonic
from delaytasks.core.errors import InvalidScheduleError, LeaseLostError, TaskCancelledError
from delaytasks.core.interfaces import CallerConnection, Transaction
from delaytasks.core.task import DelayTask
from delaytasks.core.workers import LastRenewal

if TYPE_CHECKING:
    from delaytasks.storage.claims import Claims

#: The longest result of a task. Results are for inspection; data belongs elsewhere.
MAX_RESULT_BYTES = 16 * 1024
#: `check_lease` raises if less than this part of the lease is left. If renewals succeed, more than
#: half is left.
LAST_PART = 1 / 3
#: Returns the transaction of a caller's `session=`.
TransactionOf = Callable[[Any, DelayTask], Transaction | None]


class LeaseEndsError(LeaseLostError):
    """The lease is about to end or has ended, because the worker could not renew it."""


@dataclass(frozen=True)
class Lease:
    """How long this process owns its rows, as far as it knows without a query."""

    duration_s: float
    #: The longest time from the claim of a row to the start of its run.
    max_wait_s: float
    #: Returns the last renewal that succeeded.
    last_renewal: Callable[[], LastRenewal]
    #: Whether a caller has asked the run of this id and version to stop.
    is_asked_to_stop: Callable[[int, int], bool]

    def left_s(self, began: float) -> float:
        """Return how long the lease of a row lasts whose run began at `began`.

        A lease that ended has no time left, even if the worker has renewed its leases since then:
        another worker may have recovered the row before that.
        """
        claimed_at = began - self.max_wait_s
        renewal = self.last_renewal()
        if claimed_at < renewal.lost_if_claimed_before:
            return 0.0
        return max(claimed_at, renewal.asked_at) + self.duration_s - monotonic()


class TaskRun:
    def __init__(
        self, task: DelayTask, claims: Claims, transaction_of: TransactionOf, lease: Lease
    ) -> None:
        self.task = task
        self._claims = claims
        self._transaction_of = transaction_of
        self._lease = lease
        #: The time of the monotonic clock.
        self.began = monotonic()
        #: The processor has settled the row as DONE in its own transaction.
        self.is_written = False
        #: The transaction is committed, or was about to be.
        self.is_committed = False
        #: The commit is confirmed. SQLAlchemy reports the commit of a plain connection before it
        #: happens.
        self.is_certain = False
        self._connection: CallerConnection | None = None

    @property
    def is_left_open(self) -> bool:
        """Whether the processor's transaction has not ended, so that the row is still locked."""
        if self.is_committed or self._connection is None:
            return False
        return self._connection.in_transaction()

    @property
    def is_rolled_back(self) -> bool:
        return self.is_written and not self.is_committed and not self.is_left_open

    def complete(self, session: Any, result: Any) -> None:
        task = self.task
        kept = None if result is None else encode_body(result, MAX_RESULT_BYTES)
        transaction = self._transaction_of(session, task)
        if transaction is None:
            raise InvalidScheduleError(
                "complete() takes the session that the effect is written in: session=…"
            )
        with transaction.guard() as self._connection:
            if not self._claims.complete(task, kept, self._connection):
                raise LeaseLostError(
                    f"task {task.id} ({task.tag}) is no longer this run's: roll back what it did",
                    task.id,
                )
        self.is_written = True
        transaction.after_commit([task], self._committed)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether `cancel(running=True)` has asked this run to stop."""
        return self._lease.is_asked_to_stop(self.task.id, self.task.version)

    def check_lease(self) -> None:
        task, left_s = self.task, self._lease.left_s(self.began)
        if self.is_asked_to_stop:
            raise TaskCancelledError(f"task {task.id} ({task.tag}) was cancelled: stop", task.id)
        if left_s < self._lease.duration_s * LAST_PART:
            end = f"ends in {left_s:.1f} s" if left_s > 0 else "has ended"
            raise LeaseEndsError(
                f"the lease of task {task.id} ({task.tag}) could not be renewed and {end}: stop",
                task.id,
            )

    def _committed(self, _tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
        self.is_committed, self.is_certain = True, is_committed
