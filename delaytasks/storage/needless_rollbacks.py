"""Prevents needless ROLLBACK statements on MySQL and MariaDB.

SQLAlchemy rolls back when a connection returns to its pool, even after a commit or an autocommitted
statement. The drivers of PostgreSQL send nothing then, but those of MySQL send ROLLBACK, so that
each call would wait for one more answer.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.default import DefaultDialect

#: Marks a pooled connection with an open transaction.
_IS_OPEN = "delaytasks.open"
#: SQLAlchemy has this option since 2.0.43.
_SKIP = "skip_autocommit_rollback"


def options(autocommit: bool) -> dict[str, Any]:
    """Return the options for `create_engine`."""
    if not autocommit:
        return {"pool_reset_on_return": None}
    return {_SKIP: True} if _SKIP in signature(DefaultDialect.__init__).parameters else {}


def skip(engine: Engine) -> None:
    """Roll back returned connections of this engine only if their transaction is still open."""
    event.listen(engine, "begin", _begin)
    event.listen(engine, "commit", _end)
    event.listen(engine, "rollback", _end)
    event.listen(engine, "reset", _reset)


def _begin(connection: Connection) -> None:
    connection.info[_IS_OPEN] = True


def _end(connection: Connection) -> None:
    if not connection.invalidated:  # a connection that was lost has no info, and is not used again
        connection.info.pop(_IS_OPEN, None)


def _reset(connection: Any, record: Any, _state: object) -> None:
    """Roll back what a caller has left open, for example in a generator that was not closed."""
    if record.info.pop(_IS_OPEN, False):
        connection.rollback()
