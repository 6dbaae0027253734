"""Every error that delaytasks raises.

DelayTaskError
├── InvalidInputError (also a ValueError)      the caller's arguments
│   ├── InvalidDelayError, NaiveDatetimeError, InvalidScheduleError
│   ├── BodyNotJSONError, BodyTooLargeError, BodyNotStorableError, BodyRefusedError
│   ├── InvalidTagError, InvalidKeyError, InvalidQueueError, InvalidIdError, InvalidPriorityError
│   ├── InvalidQueryError, InvalidLadderError, InvalidPolicyError, ShardMismatchError
│   ├── ForbiddenURLError, InvalidHeaderError
│   └── UnknownTagError
├── TaskStateError                             the task is not in a state that allows it
│   ├── TaskNotFoundError (also a LookupError)
│   ├── DuplicateTaskError
│   ├── CancelTooLateError, InvalidStatusError, StaleVersionError, NotRunningError, LeaseLostError
├── StoreError                                 the database
│   ├── StoreUnavailableError, OutcomeUnknownError, SessionUnusableError
├── ConfigError
├── BodyEncryptedError (also a ValueError)      no key here opens what is stored
├── InvalidSignatureError                      a callback that was received
├── InvalidOutcomesError                       how a processor said that its task ends
├── TaskFailedError                            for Celery's signals: the processor returned Fail()
└── DuplicateProcessorError
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delaytasks.core.states import Status


class DelayTaskError(Exception):
    """Root of all errors raised by delaytasks."""


class DelayTaskWarning(UserWarning):
    """Root of all warnings issued by delaytasks."""


class InvalidInputError(DelayTaskError, ValueError):
    """An argument can not be accepted; nothing was done."""


class InvalidDelayError(InvalidInputError):
    """The delay is negative, not finite, not a number, or above `max_delay_s`."""


class NaiveDatetimeError(InvalidInputError):
    """An instant has no time zone."""


class InvalidScheduleError(InvalidInputError):
    """The arguments contradict each other."""


class BodyNotJSONError(InvalidInputError):
    """The body holds something that JSON can not say."""


class BodyTooLargeError(InvalidInputError):
    """The body is longer than `max_body_bytes`."""


class BodyNotStorableError(InvalidInputError):
    """The text holds NUL or a lone surrogate, which no database here can store."""


class BodyRefusedError(InvalidInputError):
    """The schema of the tag's processor does not take the body."""


class InvalidTagError(InvalidInputError):
    """The tag is empty, blank, too long, or has control characters."""


class InvalidKeyError(InvalidInputError):
    """The key is empty, blank, too long, or has control characters."""


class InvalidQueueError(InvalidInputError):
    """The queue is empty, blank, too long, or has control characters."""


class InvalidIdError(InvalidInputError):
    """Not an integer from 1 to 2^63 − 1, or of no shard that there is."""


class InvalidPriorityError(InvalidInputError):
    """Not an integer from 0 to 9."""


class InvalidQueryError(InvalidInputError):
    """A page size or cursor can not be used."""


class InvalidRetryScheduleError(InvalidInputError):
    """A ladder, or one of its rungs, is not of a form that can be climbed."""


class InvalidPolicyError(InvalidInputError):
    """A limit or a rate is not of a form that can be kept, or neither a tag nor a queue is named."""


class ShardMismatchError(InvalidInputError):
    """With several databases: the session, the id and the key of a call belong to different ones."""


class ForbiddenURLError(InvalidInputError):
    """Callbacks may not go there: not https, not public, or spelled so that it can be read in two ways."""


class InvalidHeaderError(InvalidInputError):
    """A callback's header has a name or value that can not be sent, or is the sender's own."""


class UnknownTagError(InvalidInputError):
    """Nobody registered a processor for the tag (only raised with `strict_tags`)."""


class TaskStateError(DelayTaskError):
    """The task does not allow this move now; `id` names it."""

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class TaskNotFoundError(TaskStateError, LookupError):
    """There is no such task."""


class DuplicateTaskError(TaskStateError):
    """A live task has this key, or another task has this id; `id` is the one that exists."""


class InvalidStatusError(TaskStateError):
    """The task's status does not allow the move; `status` is the one that the task has."""

    def __init__(self, message: str, id: int | None = None, status: Status | None = None) -> None:
        super().__init__(message, id)
        self.status = status


class CancelTooLateError(InvalidStatusError):
    """The task is running already."""


class StaleVersionError(TaskStateError):
    """Somebody else moved the task since it was read."""


class NotRunningError(TaskStateError):
    """`complete` is for the processor that runs the task, while it does."""


class LeaseLostError(TaskStateError):
    """The task was taken from this run, whose worker was silent for too long, or soon will be: undo what it did."""


class StoreError(DelayTaskError):
    """The database did not do what was asked."""


class StoreUnavailableError(StoreError):
    """The database can not be reached, or stays busy; nothing was done. Of several, `shard` is the one that is down.
    With `is_locked` it answers, but some open transaction has locked what was to be changed. With `is_unable` it
    answers, but cannot do what was asked: its disk is full, or it takes no writes."""

    def __init__(
        self,
        message: str,
        shard: int | None = None,
        is_locked: bool = False,
        is_unable: bool = False,
    ) -> None:
        super().__init__(message)
        self.shard = shard
        self.is_locked = is_locked
        self.is_unable = is_unable


class OutcomeUnknownError(StoreError):
    """The connection broke before the answer came: it may be done or not.

    Scheduling again with `id=error.id` is safe either way.
    """

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class SessionUnusableError(StoreError):
    """The caller's session or connection is closed, aborted or read-only; nothing was sent."""


class ConfigError(DelayTaskError):
    """A setting is wrong; the message names it and the remedy."""


class BodyEncryptedError(DelayTaskError, ValueError):
    """A stored body or result is encrypted with a key that this process does not have, or was changed since."""


class InvalidSignatureError(DelayTaskError):
    """A callback that was received is not signed, not by a known secret, or not now; answer 401."""


class InvalidOutcomesError(DelayTaskError):
    """A processor returned or raised something that does not say how its task ends, or each task of its batch."""


class TaskFailedError(DelayTaskError):
    """Celery's `task_failure` signal has it when a processor returned `Fail()`, or `Retry()` without a delay left, and
    its `task_postrun` also for `Cancel()`. Nobody raises it. `id` names the task."""

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class DuplicateProcessorError(DelayTaskError):
    """The tag has a processor already."""
