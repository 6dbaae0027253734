"""INSERT in the fastest way of each database: one row unless it exists, and many rows."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any

from sqlalchemy import Connection, ScalarSelect, Table, bindparam, exc, insert, select, update

from delaytasks.db.database import Database
from delaytasks.db.driver_errors import as_sqlalchemy_error, is_duplicate
from delaytasks.db.engines import PostgresqlDriver, driver_of
from delaytasks.db.row_lists import (
    MAX_TEXT,
    Prepared,
    check_row_count,
    instant_text,
    json_rows,
    parts,
)
from delaytasks.db.rows import DIFFERING_COLUMNS, NEW_COLUMNS, columns_of, new_values
from delaytasks.db.schema import Schema
from delaytasks.db.types import UTCDateTime
from delaytasks.model.body import dump_json
from delaytasks.model.filters import batches
from delaytasks.model.task import DelayedTask

#: Bytes of a row's other columns, with their names.
_OTHERS = 500
#: Rows and characters of one part of COPY's input. The driver keeps a buffer for the largest part.
_COPY_ROWS, _COPY_CHARACTERS = 200, 65_536
#: Rows of a statement with a parameter for each value. More rows are not faster.
_BOUND_ROWS = 100


def skipping_insert(database: Database) -> Any:
    """Return the INSERT that skips rows which exist; None on MySQL. Unused dialects are not
    imported."""
    if not database.can.insert_or_skip:
        return None
    return import_module(f"sqlalchemy.dialects.{database.backend}").insert


def insert_if_absent(database: Database, table: Table, column: Any) -> Any:
    """Return the INSERT that leaves rows which exist as they are.

    On MySQL it sets `column` to its own value. Otherwise MySQL would keep a shared lock on a row
    that exists, with which two transactions that update it then deadlock.
    """
    skipping = skipping_insert(database)
    if skipping is not None:
        return skipping(table).on_conflict_do_nothing()
    mysql = import_module("sqlalchemy.dialects.mysql")
    return mysql.insert(table).on_duplicate_key_update({column.name: column})


class Insert:
    """INSERT into one table. A row that exists is skipped."""

    def __init__(self, database: Database, table: Table, names: Sequence[str]) -> None:
        self._db = database
        self._names = names
        skipping = skipping_insert(database)
        statement = skipping(table).on_conflict_do_nothing() if skipping else insert(table)
        # Without this option SQLAlchemy does not read the count on psycopg 3 and asyncpg, and
        # returns -1.
        self._statement = statement.execution_options(preserve_rowcount=True)
        self._prepared = Prepared(database, self._statement, names=names)

    def __call__(self, on: Any, values: dict[str, Any]) -> bool:
        """True if the row is new."""
        try:
            if self._db.owns(on):
                return bool(self._prepared(on, values).row_count)
            if _is_psycopg2(on):  # a caller's connection, on which we leave no prepared statement
                return bool(on.exec_driver_sql(self._sql, values).rowcount)
            return bool(on.execute(self._statement, values).rowcount)
        except exc.IntegrityError as error:
            if self._db.can.insert_or_skip or not is_duplicate(error):
                raise
            return False  # this is how the database reports a row that exists

    @functools.cached_property
    def _sql(self) -> str:
        """The SQL text, which SQLAlchemy would compile anew for each row."""
        from sqlalchemy.dialects.postgresql import psycopg2

        dialect: Any = psycopg2.dialect()  # type: ignore[no-untyped-call]
        return str(self._statement.compile(dialect=dialect, column_keys=self._names))


class BulkInsert:
    """INSERT of many new tasks.

    PostgreSQL reads them by COPY, SQLite from a parameter for each value, and MySQL from one JSON
    parameter for many rows. Values that all rows share are sent once.
    """

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._schema = schema
        self._table = schema.tasks
        #: The statement of each set of columns, and of the columns in which the rows differ.
        self._statements: dict[tuple[tuple[str, ...], tuple[str, ...]], Any] = {}

    def __call__(self, on: Any, tasks: Sequence[DelayedTask]) -> None:
        names = columns_of(tasks)
        rows = new_values(tasks, self._schema, names)
        driver = driver_of(on) if self._db.can.copy else None
        if driver is not None:
            self._copy(on, driver, rows, names)
        elif (
            self._db.can.binds_values
            and isinstance(on, Connection)
            and not on._is_autocommit_isolation()
        ):
            self._bind(on, rows, names)
        else:
            self._insert_all(on, rows, names)

    def _bind(
        self, on: Connection, rows: Iterator[tuple[Any, ...]], names: tuple[str, ...]
    ) -> None:
        """Insert by one fixed statement, since the driver keeps a statement and its last
        parameters.

        The remaining rows, and rows that are too large to be kept, are sent as JSON.
        """
        marks = f"({', '.join('?' * len(names))})"
        statement = (
            f"INSERT INTO {self._target(on, names)} VALUES {', '.join([marks] * _BOUND_ROWS)}"
        )
        bound, left = functools.cache(self._bound), list[tuple[Any, ...]]()
        for some in batches(rows, _BOUND_ROWS):
            length = sum(len(row[_BODY]) + len(row[_HEADERS] or "") for row in some)
            if len(some) < _BOUND_ROWS or length > MAX_TEXT:
                left += some
                continue
            values: list[Any] = []
            for id, body, due, key, *others in some:
                values += (id, body, *bound(due), key, *bound(*others))
            on.exec_driver_sql(statement, tuple(values))
        self._insert_all(on, left, names)

    def _bound(self, *values: Any) -> Sequence[Any]:
        return [self._text(value) if isinstance(value, datetime) else value for value in values]

    def _insert_all(self, on: Any, rows: Iterable[tuple[Any, ...]], names: tuple[str, ...]) -> None:
        for part in parts(rows, _size):
            self._insert(on, part, names)

    def _insert(self, on: Any, stored: Sequence[tuple[Any, ...]], names: tuple[str, ...]) -> None:
        columns = dict(zip(names, zip(*stored, strict=True), strict=True))
        common = {
            name: values[0]
            for name, values in columns.items()
            if name != "id" and len(set(values)) == 1
        }
        own = tuple(name for name in columns if name not in common)
        texts = [
            map(self._text, columns[name]) if self._is_instant(name) else columns[name]
            for name in own
        ]
        rows = [dict(zip(own, row, strict=True)) for row in zip(*texts, strict=True)]
        statement = self._statements.get((names, own))
        if statement is None:
            w = json_rows(self._db, own)
            values = [
                w.c[name] if name in own else bindparam(name, type_=self._table.c[name].type)
                for name in columns
            ]
            statement = self._statements[names, own] = insert(self._table).from_select(
                [*columns], select(*values)
            )
        if "status" in common:
            common["status"] = int(common["status"])
        on.execute(statement, {**common, "rows": dump_json(rows)})

    def _is_instant(self, name: str) -> bool:
        return isinstance(self._table.c[name].type, UTCDateTime)

    def _text(self, instant: datetime | None) -> str | None:
        return instant_text(self._db, instant)

    def _copy(
        self,
        on: Connection,
        driver: PostgresqlDriver,
        rows: Iterator[tuple[Any, ...]],
        names: tuple[str, ...],
    ) -> None:
        dbapi: Any = on.dialect.dbapi
        cursor: Any = on.connection.cursor()
        try:
            driver.copy(cursor, f"COPY {self._target(on, names)} FROM STDIN", _copy_parts(rows))
        except dbapi.Error as error:
            raise as_sqlalchemy_error(on, "COPY", error) from error
        finally:
            cursor.close()

    def _target(self, on: Connection, names: tuple[str, ...]) -> str:
        table = on.dialect.identifier_preparer.format_table(self._table)
        return f"{table} ({', '.join(names)})"


def _is_psycopg2(on: Any) -> bool:
    return isinstance(on, Connection) and on.dialect.driver == "psycopg2"


_BODY, _HEADERS = NEW_COLUMNS.index("message_body"), NEW_COLUMNS.index("headers")


def _size(row: tuple[Any, ...]) -> int:
    """Return the bytes that the row adds to a statement."""
    return _OTHERS + _bytes(row[_BODY]) + _bytes(row[_HEADERS] or "")


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


_SPECIAL = re.compile(r"[\\\t\n\r]")
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _copy_parts(rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    """Yield the input of COPY. Values that rows share are formatted once."""
    known: dict[Any, str] = {}
    while part := _part(rows, known):
        yield part


def _part(rows: Iterator[tuple[Any, ...]], known: dict[Any, str]) -> str:
    """Return the lines of the next rows; an empty text at their end."""
    lines: list[str] = []
    size = 0
    for row in itertools.islice(rows, _COPY_ROWS):
        id, body, due, key = row[:DIFFERING_COLUMNS]
        common = row[DIFFERING_COLUMNS:]
        if due not in known:
            known[due] = str(due)
        if common not in known:
            known[common] = "\t".join(map(_field, common))
        shown_key = "\\N" if key is None else _field(key)
        line = f"{id}\t{_field(body)}\t{known[due]}\t{shown_key}\t{known[common]}\n"
        lines.append(line)
        size += len(line)
        if size > _COPY_CHARACTERS:
            break
    return "".join(lines)


def _field(value: Any) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        return value.translate(_ESCAPES) if _SPECIAL.search(value) else value
    return str(int(value)) if isinstance(value, int) else str(value)


# -- Numbers that count the changes which workers look for once a second, in one small table ------


#: The rows of the table: changes of policies, and requests to cancel running tasks.
POLICY_CHANGES, CANCEL_REQUESTS = 1, 2


class ChangeNumbers:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._t = schema.policy_changes
        self._insert = Insert(database, self._t, ("id", "number"))

    def of(self, row: int) -> ScalarSelect[int]:
        """Return the query of a number; it yields NULL if nothing has been counted."""
        return select(self._t.c.number).where(self._t.c.id == row).scalar_subquery()

    def next(self, on: Any, row: int) -> int:
        """Count one change, and return its number. The row stays locked until the commit."""
        mine = self._t.c.id == row
        counting = update(self._t).where(mine).values(number=self._t.c.number + 1)
        if not on.execute(counting).rowcount:
            self._insert(on, {"id": row, "number": 0})
            check_row_count(on.execute(counting).rowcount, 1, "the number of changes")
        number: int = on.execute(select(self._t.c.number).where(mine)).scalar_one()
        return number
