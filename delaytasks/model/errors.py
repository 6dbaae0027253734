"""The errors that delaytasks raises.

DelayTaskError
├── InvalidInputError (also a ValueError)      an argument or an option; `argument` is its name
│   ├── BodyRefusedError, ForbiddenURLError, UnknownTagError
├── TaskStateError                             the task is not in a state that allows it
│   ├── TaskNotFoundError (also a LookupError)
│   ├── DuplicateTaskError, StaleVersionError
│   ├── LeaseLostError, TaskCancelledError     for the processor that runs the task
├── StoreError                                 the database
│   ├── StoreUnavailableError, OutcomeUnknownError, SessionUnusableError
├── WaitTimeoutError (also a TimeoutError)
├── ConfigError
├── BodyEncryptedError (also a ValueError)     no key of this process decrypts a stored text
└── TaskFailedError                            the task of `result` is FAILED

A class is a kind that callers handle in the same way. The message explains the case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delaytasks.model.moves import Status

#: Everything here can be imported from `delaytasks`.
__all__ = [
    "BodyEncryptedError",
    "BodyRefusedError",
    "ConfigError",
    "DelayTaskError",
    "DuplicateTaskError",
    "ForbiddenURLError",
    "InvalidInputError",
    "LeaseLostError",
    "OutcomeUnknownError",
    "SessionUnusableError",
    "StaleVersionError",
    "StoreError",
    "StoreUnavailableError",
    "TaskCancelledError",
    "TaskFailedError",
    "TaskNotFoundError",
    "TaskStateError",
    "UnknownTagError",
    "WaitTimeoutError",
]


class DelayTaskError(Exception):
    """The base class of all errors that delaytasks raises.

    Attributes
    ----------
    id
        The id of the task, if the error is about one.
    """

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class InvalidInputError(DelayTaskError, ValueError):
    """An argument or an option is invalid. Nothing was done; correct it.

    Attributes
    ----------
    argument
        The name of the argument or option, such as "tag".
    is_too_large
        The argument is a body that is longer than the setting `max_body_bytes`.
    """

    is_too_large = False

    def __init__(self, message: str, argument: str) -> None:
        super().__init__(message)
        self.args = message, argument  # from which Celery's backends rebuild an error
        self.argument = argument

    def __str__(self) -> str:
        return str(self.args[0])


class BodyRefusedError(InvalidInputError):
    """The schema of the tag's processor refuses the body. The message has the schema's reason."""


class ForbiddenURLError(InvalidInputError):
    """The URL of a callback is not https, not public or ambiguous.

    The setting `callback_allow` permits hosts and networks.
    """


class UnknownTagError(InvalidInputError):
    """The tag has no processor in this process, which has processors of other tags.

    The message has the nearest tag. The setting `tags` permits other tags.
    """


class TaskStateError(DelayTaskError):
    """The state of the task does not allow the move.

    Attributes
    ----------
    status
        The status of the task, if its status does not allow the move.
    """

    def __init__(self, message: str, id: int | None = None, status: Status | None = None) -> None:
        super().__init__(message, id)
        self.status = status


class TaskNotFoundError(TaskStateError, LookupError):
    """There is no such task or recurring schedule, or the task was purged."""


class DuplicateTaskError(TaskStateError):
    """Another task has the id, or a live task has the key. `id` is the id of that task.

    Use `on_conflict="keep"` or `"replace"` if the key may be in use.
    """


class StaleVersionError(TaskStateError):
    """The task was moved since it was read. Read it again, and decide again."""


class LeaseLostError(TaskStateError):
    """The run lost its lease, or soon will, because its worker was silent for too long.

    Another worker may run the task again: undo the work of this run.
    """


class TaskCancelledError(TaskStateError):
    """The task is cancelled: for its processor, which lets the error end it, and for `result`."""


class WaitTimeoutError(DelayTaskError, TimeoutError):
    """The task of `result` has not ended in time. `id` is the id of the task."""


class StoreError(DelayTaskError):
    """The database could not do the work. The message names the reason, such as missing tables."""


class StoreUnavailableError(StoreError):
    """The database cannot be reached or stays busy. The statement was not done; try again later.

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


class OutcomeUnknownError(StoreError):
    """The connection broke before the database answered, so the work may be done or not.

    It is safe to schedule again with `id=error.id`.
    """


class SessionUnusableError(StoreError):
    """The session or connection is closed, aborted or read-only. Nothing was sent; roll back."""


class ConfigError(DelayTaskError):
    """A setting or the code of the app is wrong. The message names the remedy."""


class BodyEncryptedError(DelayTaskError, ValueError):
    """A stored body or result cannot be decrypted.

    Its key is not in `encryption_keys` of this process, or the text was changed or copied.
    """


class TaskFailedError(DelayTaskError):
    """The task of `result` is FAILED. `id` is the id of the task.

    Celery's signals receive it for a run that ended without an exception: `task_failure` for
    `Fail()`, and for `Retry()` when no retry delay is left; `task_postrun` for `Cancel()` as well.
    """
