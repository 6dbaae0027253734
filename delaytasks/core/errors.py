"""The errors that delaytasks raises.

DelayTaskError
├── InvalidInputError (also a ValueError)      the caller's arguments
│   ├── InvalidDelayError, NaiveDatetimeError, InvalidScheduleError
│   ├── BodyNotJSONError, BodyTooLargeError, BodyNotStorableError, BodyRefusedError
│   ├── InvalidTagError, InvalidKeyError, InvalidQueueError, InvalidIdError, InvalidPriorityError
│   ├── InvalidMetaError, InvalidQueryError, InvalidRetryScheduleError, InvalidPolicyError
│   ├── InvalidTimingError
│   ├── ForbiddenURLError, InvalidHeaderError
│   └── UnknownTagError
├── TaskStateError                             the task is not in a state that allows it
│   ├── TaskNotFoundError (also a LookupError)
│   ├── DuplicateTaskError
│   ├── CancelTooLateError, InvalidStatusError, StaleVersionError, NotRunningError, LeaseLostError
│   ├── TaskCancelledError
├── RecurringNotFoundError (also a LookupError)   no recurring schedule has the name
├── StoreError                                 the database
│   ├── StoreUnavailableError, OutcomeUnknownError, SessionUnusableError, SearchTimeoutError
├── WaitTimeoutError (also a TimeoutError)
├── ConfigError
├── BodyEncryptedError (also a ValueError)     no key of this process decrypts a stored text
├── InvalidSignatureError                      a received callback
├── InvalidOutcomesError                       the outcome that a processor returned or raised
├── TaskFailedError                            for Celery's signals: the processor returned Fail()
└── DuplicateProcessorError
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delaytasks.core.states import Status

#: Everything here can be imported from `delaytasks`.
__all__ = [
    "BodyEncryptedError", "BodyNotJSONError", "BodyNotStorableError", "BodyRefusedError",
    "BodyTooLargeError", "CancelTooLateError", "ConfigError", "DelayTaskError",
    "DuplicateProcessorError", "DuplicateTaskError", "ForbiddenURLError", "InvalidDelayError",
    "InvalidHeaderError", "InvalidIdError", "InvalidInputError", "InvalidKeyError",
    "InvalidMetaError", "InvalidOutcomesError", "InvalidPolicyError", "InvalidPriorityError",
    "InvalidQueryError", "InvalidQueueError", "InvalidRetryScheduleError", "InvalidScheduleError",
    "InvalidSignatureError", "InvalidStatusError", "InvalidTagError", "InvalidTimingError",
    "LeaseLostError", "NaiveDatetimeError", "NotRunningError", "OutcomeUnknownError",
    "RecurringNotFoundError", "SearchTimeoutError", "SessionUnusableError", "StaleVersionError",
    "StoreError", "StoreUnavailableError", "TaskCancelledError", "TaskFailedError",
    "TaskNotFoundError", "TaskStateError", "UnknownTagError", "WaitTimeoutError",
]  # fmt: skip


class DelayTaskError(Exception):
    """The base class of all errors that delaytasks raises."""


class InvalidInputError(DelayTaskError, ValueError):
    """An argument is invalid. Nothing was done; correct the argument."""


class InvalidDelayError(InvalidInputError):
    """A delay is negative, not finite, not a number, or above `max_delay_s`."""


class NaiveDatetimeError(InvalidInputError):
    """An instant has no time zone. Use, for example, `datetime.now(timezone.utc)`."""


class InvalidScheduleError(InvalidInputError):
    """Arguments contradict each other, such as a delay and an instant. Give one of them."""


class BodyNotJSONError(InvalidInputError):
    """A body contains a value without a JSON form. The message has its path."""


class BodyTooLargeError(InvalidInputError):
    """A body is longer than `max_body_bytes`. Store it elsewhere and schedule its name."""


class BodyNotStorableError(InvalidInputError):
    """A text contains NUL or a lone surrogate, which the databases cannot store. Remove it."""


class BodyRefusedError(InvalidInputError):
    """The schema of the tag's processor refuses the body. The message has the schema's reason."""


class InvalidTagError(InvalidInputError):
    """A tag is empty, blank, too long, or contains control characters."""


class InvalidKeyError(InvalidInputError):
    """A key is empty, blank, too long, or contains control characters."""


class InvalidQueueError(InvalidInputError):
    """A queue name is empty, too long, or contains other characters than letters, digits, _.-"""


class InvalidIdError(InvalidInputError):
    """A task id is not an integer from 1 to 2^63 - 1."""


class InvalidPriorityError(InvalidInputError):
    """A priority is not an integer from 0 to 9."""


class InvalidMetaError(InvalidInputError):
    """`meta` has too many or too long pairs, or a name or a value that is not allowed."""


class InvalidQueryError(InvalidInputError):
    """A filter, a page size or a cursor of a query is invalid."""


class InvalidRetryScheduleError(InvalidInputError):
    """A retry schedule is empty or too long, or one of its delays is invalid."""


class InvalidPolicyError(InvalidInputError):
    """A limit or a rate is invalid, or the call names neither a tag nor a queue, or both."""


class ForbiddenURLError(InvalidInputError):
    """The URL of a callback is not https, not public or ambiguous.

    The setting `callback_allow` permits hosts and networks.
    """


class InvalidHeaderError(InvalidInputError):
    """A header of a callback cannot be sent, or is one that the sender itself sets."""


class InvalidTimingError(InvalidInputError):
    """The timing of a recurring schedule is invalid, such as its cron expression or time zone."""


class UnknownTagError(InvalidInputError):
    """The tag has no processor in this process, which has processors of other tags.

    The message has the nearest tag. The settings `tags` and `strict_tags` permit other tags.
    """


class TaskStateError(DelayTaskError):
    """The state of the task does not allow the move. `id` is the id of the task."""

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class TaskNotFoundError(TaskStateError, LookupError):
    """The task does not exist, or was purged."""


class DuplicateTaskError(TaskStateError):
    """Another task has the id, or a live task has the key. `id` is the id of that task.

    Use `on_conflict="keep"` or `"replace"` if the key may be in use.
    """


class InvalidStatusError(TaskStateError):
    """The status of the task does not allow the move. `status` is the status of the task."""

    def __init__(self, message: str, id: int | None = None, status: Status | None = None) -> None:
        super().__init__(message, id)
        self.status = status


class CancelTooLateError(InvalidStatusError):
    """`cancel(strict=True)` was called for a running task. Let the task finish."""


class StaleVersionError(TaskStateError):
    """The task was moved since it was read. Read it again, and decide again."""


class NotRunningError(TaskStateError):
    """`task.complete` was called outside the processor that runs the task."""


class LeaseLostError(TaskStateError):
    """The run lost its lease, or soon will, because its worker was silent for too long.

    Another worker may run the task again: undo the work of this run.
    """


class TaskCancelledError(TaskStateError):
    """A caller has cancelled the running task. Let the error end the processor."""


class RecurringNotFoundError(DelayTaskError, LookupError):
    """No recurring schedule has the name. `delays.recurring.list()` returns all schedules."""


class WaitTimeoutError(DelayTaskError, TimeoutError):
    """The task of `wait` has not ended in time. `id` is the id of the task."""

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class StoreError(DelayTaskError):
    """The database could not do the work. The message names the reason, such as missing tables."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached or stays busy. Nothing was done; try again later.

    Attributes
    ----------
    is_locked
        The database answers, but an open transaction has locked the rows.
    is_unable
        The database answers, but is read-only or its disk is full.
    """

    def __init__(self, message: str, is_locked: bool = False, is_unable: bool = False) -> None:
        super().__init__(message)
        self.is_locked = is_locked
        self.is_unable = is_unable


class SearchTimeoutError(StoreError):
    """A search of the console took too long. Narrow its filter, for example by a status."""


class OutcomeUnknownError(StoreError):
    """The connection broke before the database answered, so the work may be done or not.

    It is safe to schedule again with `id=error.id`.
    """

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class SessionUnusableError(StoreError):
    """The session or connection is closed, aborted or read-only. Nothing was sent; roll back."""


class ConfigError(DelayTaskError):
    """A setting is wrong. The message names the setting and the remedy."""


class BodyEncryptedError(DelayTaskError, ValueError):
    """A stored body or result cannot be decrypted.

    Its key is not in `encryption_keys` of this process, or the text was changed or copied.
    """


class InvalidSignatureError(DelayTaskError):
    """A received callback has no signature, an unknown one or an old one. Answer 401."""


class InvalidOutcomesError(DelayTaskError):
    """A processor returned or raised a value that is no outcome for its task or its batch."""


class TaskFailedError(DelayTaskError):
    """The error in Celery's signals for a task that ended without an exception; it is never raised.

    `task_failure` receives it for `Fail()`, and for `Retry()` when no retry delay is left.
    `task_postrun` receives it for `Cancel()` as well. `id` is the id of the task.
    """

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class DuplicateProcessorError(DelayTaskError):
    """The tag has a processor already. Register each tag once."""
