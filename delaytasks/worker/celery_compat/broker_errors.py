"""Tells errors of the broker from errors that a strange message causes."""

from __future__ import annotations

from redis.exceptions import DataError

#: The errors of reading a strange message, or of using its fields: its delivery tag may be a list, for example.
OF_DATA = (LookupError, TypeError, ValueError, DataError)


def is_the_brokers(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    """Celery takes a message without properties for a lost connection, too."""
    return isinstance(error, OSError) or (
        isinstance(error, kinds) and not isinstance(error, OF_DATA)
    )
