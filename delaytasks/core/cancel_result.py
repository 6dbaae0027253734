"""What a call of `cancel` did, and why it did nothing."""

from __future__ import annotations

from dataclasses import dataclass

from delaytasks.core.errors import InvalidStatusError, TaskNotFoundError, TaskStateError
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask

#: A task with one of these statuses leaves nothing to cancel. A status of another program's is not among them, since
#: nobody knows what it means.
_NOTHING_TO_CANCEL = (Status.RUNNING, Status.DONE, Status.FAILED)


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The answer of `cancel`: true only if this call cancelled the task, which then never starts.

    `status` is the status of the task after the call, and None if no task was found. `id` is None only if no task was
    found by its key. `reason` says in words what happened.
    """

    is_cancelled: bool
    reason: str
    id: int | None = None
    status: Status | None = None

    def __bool__(self) -> bool:
        return self.is_cancelled

    @classmethod
    def cancelled(cls, task: DelayTask) -> CancelResult:
        return cls(True, f"task {task.id} ({task.tag}) is cancelled", task.id, Status.CANCELLED)

    @classmethod
    def cancelled_before(cls, id: int) -> CancelResult:
        return cls(False, f"task {id} was cancelled before", id, Status.CANCELLED)

    @classmethod
    def of_refusal(cls, error: TaskStateError) -> CancelResult | None:
        """The result for an error which means that nothing is left to cancel; None for any other error."""
        if isinstance(error, TaskNotFoundError):
            return cls(False, str(error), error.id)
        if isinstance(error, InvalidStatusError) and error.status in _NOTHING_TO_CANCEL:
            is_running = error.status is Status.RUNNING
            reason = (
                str(error)
                if is_running
                else f"task {error.id} has ended: it is {error.status.name}"
            )
            return cls(False, reason, error.id, error.status)
        return None
