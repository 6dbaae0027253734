"""Lets the statements of delaytasks read a test's clock instead of the database's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event

from delaytasks.core.clock import from_us

#: What marks a statement as one of ours: the names of the tables, or the label of the time.
_OUR_NAMES = ("yb_delay_", "db_now")
#: The statement clock of each database as `delaytasks.storage.types` writes it, and the notation of
#: an instant in its place.
_CLOCKS = {
    "postgresql": ("clock_timestamp()", "CAST('{}+00:00' AS TIMESTAMPTZ)"),
    "mysql": ("UTC_TIMESTAMP(6)", "CAST('{}' AS DATETIME(6))"),
    "mariadb": ("UTC_TIMESTAMP(6)", "CAST('{}' AS DATETIME(6))"),
    "sqlite": ("%f000', 'now'", "%f000', '{}'"),
}


class SimulatedTime:
    """Rewrites statements.

    The text of a statement changes with each instant, so statements must not be prepared.

    Parameters
    ----------
    now_us
        Returns the microseconds since 1970, in whole milliseconds: SQLite's clock has no more.
    """

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us

    def rewritten(self, statement: str, dialect: str) -> str:
        """Return the statement with the test's instant in place of the database's clock."""
        clock, literal = _CLOCKS[dialect]
        if clock not in statement or not any(mark in statement for mark in _OUR_NAMES):
            return statement
        instant = from_us(self._now_us()).strftime("%Y-%m-%d %H:%M:%S.%f")
        if dialect == "sqlite":
            instant = instant[:-3]
        return statement.replace(clock, literal.format(instant))

    @contextmanager
    def on_engines(self) -> Iterator[None]:
        """Rewrite the statements of all engines of this process, the application's included."""
        event.listen(Engine, "before_cursor_execute", self._before_execute, retval=True)
        try:
            yield
        finally:
            event.remove(Engine, "before_cursor_execute", self._before_execute)

    def _before_execute(
        self, connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> tuple[str, Any]:
        if connection.dialect.name in _CLOCKS:
            statement = self.rewritten(statement, connection.dialect.name)
        return statement, parameters
