"""Tells errors of the broker from errors that a malformed message causes."""

from __future__ import annotations

from redis.exceptions import DataError

#: Errors from reading a malformed message or using its fields, such as a list as delivery tag.
DATA_ERRORS = (LookupError, TypeError, ValueError, DataError)


def is_broker_error(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    """Return whether `error` is an error of the broker, where `kinds` are the transport's errors.

    Celery counts a `KeyError` from a message without properties among the connection errors.
    """
    return isinstance(error, OSError) or (
        isinstance(error, kinds) and not isinstance(error, DATA_ERRORS)
    )
