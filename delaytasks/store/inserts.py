"""INSERT in the ways that each database is best at: one row unless it exists, and many rows at once."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Table, exc, insert
from sqlalchemy.dialects import postgresql, sqlite

from delaytasks.core.task import DelayTask
from delaytasks.store.database import Database
from delaytasks.store.driver_errors import told
from delaytasks.store.rows import values_of


class Insert:
    """INSERT into one table; a row that exists is passed over."""

    def __init__(self, database: Database, table: Table) -> None:
        self._can_skip = database.can.insert_or_skip
        skipping: Any = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}.get(database.url.get_backend_name())
        self._statement = skipping(table).on_conflict_do_nothing() if skipping else insert(table)

    def __call__(self, on: Any, values: dict[str, Any]) -> bool:
        """True if the row is new."""
        if self._can_skip:
            return bool(on.execute(self._statement, values).rowcount)
        try:
            on.execute(self._statement, values)
        except exc.IntegrityError as error:
            if not is_duplicate(error):
                raise
            return False
        return True


def insert_bulk(on: Any, database: Database, table: Table, tasks: Sequence[DelayTask]) -> None:
    """Many new rows: by COPY where there is one, else as the driver does many rows."""
    if not (database.can.copy and isinstance(on, Connection) and on.dialect.driver == "psycopg2"):
        on.execute(insert(table), [values_of(task) for task in tasks])
        return
    lines = io.StringIO()
    for task in tasks:
        lines.write(_copy_line(values_of(task).values()))
    lines.seek(0)
    target = on.dialect.identifier_preparer.format_table(table)
    names = ", ".join(values_of(tasks[0]))
    driver: Any = on.dialect.dbapi
    cursor: Any = on.connection.cursor()
    try:
        cursor.copy_expert(f"COPY {target} ({names}) FROM STDIN", lines)
    except driver.Error as error:
        raise told(on, "COPY", error) from error
    finally:
        cursor.close()


def is_duplicate(error: exc.IntegrityError) -> bool:
    first = error.orig.args[0] if error.orig is not None and error.orig.args else None
    codes = (getattr(error.orig, "pgcode", None), getattr(error.orig, "sqlstate", None), first)
    return "23505" in codes or 1062 in codes or (isinstance(first, str) and "UNIQUE" in first)


_COPY_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _copy_line(values: Iterable[Any]) -> str:
    fields = (
        "\\N" if value is None else value.translate(_COPY_ESCAPES) if isinstance(value, str) else str(value)
        for value in values
    )
    return "\t".join(fields) + "\n"
