"""Why a chunk failed as a whole."""

from __future__ import annotations

from enum import Enum

from delaytasks.core.errors import OutcomeUnknownError, StoreError, StoreUnavailableError


class FailureReason(Enum):
    """The reason decides which work waits."""

    #: The pool process died. The other processes continue with the queue.
    PROCESS_LOST = "process lost"
    #: The database cannot be reached or cannot work. Only this pauses all chunks.
    UNAVAILABLE = "unavailable"
    #: The database answers and refuses a statement, for example because a table is missing.
    REFUSED = "refused"
    #: Anything else: a bug, a row that cannot be read, or a process that a processor has broken.
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, error: BaseException) -> FailureReason:
        """Classify what a chunk raised in its process; `storage` has typed the driver's errors."""
        if isinstance(error, (StoreUnavailableError, OutcomeUnknownError)):
            return cls.UNAVAILABLE
        return cls.REFUSED if isinstance(error, StoreError) else cls.UNKNOWN
