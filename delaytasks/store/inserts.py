"""INSERT in the ways that each database is best at: one row unless it exists, and many rows at once."""

from __future__ import annotations

import io
import re
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
    target = on.dialect.identifier_preparer.format_table(table)
    names = ", ".join((*_OWN, *(name for name in values_of(tasks[0]) if name not in _OWN)))
    driver: Any = on.dialect.dbapi
    cursor: Any = on.connection.cursor()
    try:
        cursor.copy_expert(f"COPY {target} ({names}) FROM STDIN", io.StringIO(_copy_text(tasks)))
    except driver.Error as error:
        raise told(on, "COPY", error) from error
    finally:
        cursor.close()


def is_duplicate(error: exc.IntegrityError) -> bool:
    first = error.orig.args[0] if error.orig is not None and error.orig.args else None
    codes = (getattr(error.orig, "pgcode", None), getattr(error.orig, "sqlstate", None), first)
    return "23505" in codes or 1062 in codes or (isinstance(first, str) and "UNIQUE" in first)


#: Columns in which the rows of a lot differ; the others are much the same in all of them.
_OWN = ("id", "message_body", "expected_time")
_SPECIAL = re.compile(r"[\\\t\n\r]")
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _copy_text(tasks: Iterable[DelayTask]) -> str:
    """What COPY reads. The same values are put into words once."""
    lines: list[str] = []
    known: dict[tuple[Any, ...], str] = {}
    for task in tasks:
        values = values_of(task)
        id, body, due = (values.pop(name) for name in _OWN)
        others = tuple(values.values())
        words = known.get(others)
        if words is None:
            words = known[others] = "\t".join(map(_word, others))
        lines.append(f"{id}\t{_word(body)}\t{due}\t{words}\n")
    return "".join(lines)


def _word(value: Any) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        return value.translate(_ESCAPES) if _SPECIAL.search(value) else value
    return str(value)
