"""The result of `cancel`."""

from __future__ import annotations

from dataclasses import dataclass

from delaytasks.core.errors import InvalidStatusError, TaskNotFoundError, TaskStateError
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask

#: A task with one of these statuses cannot be cancelled any more. A status that another program
#: wrote is not among them, because its meaning is unknown.
_NOTHING_TO_CANCEL = (Status.RUNNING, Status.DONE, Status.FAILED)


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The result of `cancel`: true only if this call cancelled the task, which then never starts.

    Attributes
    ----------
    is_cancelled
        Whether this call cancelled the task; also the truth value of the result.
    reason
        The outcome in words.
    id
        The id of the task. None only if no task was found by its key.
    status
        The status of the task after the call. None if no task was found.
    is_requested
        Whether the task runs, and this call has asked it to stop.

    Examples
    --------
    >>> result = delays.cancel(tag="order.close", key="7")
    >>> if not result:
    ...     print(result.reason)
    """

    is_cancelled: bool
    reason: str
    id: int | None = None
    status: Status | None = None
    is_requested: bool = False

    def __bool__(self) -> bool:
        return self.is_cancelled

    @classmethod
    def cancelled(cls, task: DelayTask) -> CancelResult:
        return cls(True, f"task {task.id} ({task.tag}) is cancelled", task.id, Status.CANCELLED)

    @classmethod
    def requested(cls, task: DelayTask) -> CancelResult:
        reason = f"task {task.id} ({task.tag}) runs, and is asked to stop"
        return cls(False, reason, task.id, task.status, is_requested=True)

    @classmethod
    def cancelled_before(cls, id: int) -> CancelResult:
        return cls(False, f"task {id} was cancelled before", id, Status.CANCELLED)

    @classmethod
    def of_refusal(cls, error: TaskStateError) -> CancelResult | None:
        """Return the result for an error that means "nothing to cancel"; None for another error."""
        if isinstance(error, TaskNotFoundError):
            return cls(False, str(error), error.id)
        if isinstance(error, InvalidStatusError) and error.status in _NOTHING_TO_CANCEL:
            reason = f"task {error.id} has ended: it is {error.status.name}"
            if error.status is Status.RUNNING:
                reason = str(error)
            return cls(False, reason, error.id, error.status)
        return None
