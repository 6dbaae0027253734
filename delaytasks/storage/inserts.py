"""INSERT in the fastest way of each database: one row unless it exists, and many rows."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any

from sqlalchemy import Connection, Table, bindparam, exc, insert, select

from delaytasks.core.json_text import dump_json
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import as_sqlalchemy_error
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.row_lists import MAX_TEXT, instant_text, json_rows, parts
from delaytasks.storage.rows import DIFFERING_COLUMNS, NEW_COLUMNS, new_values
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import UTCDateTime

#: Bytes of a row's other columns, with their names.
_OTHERS = 500
#: Rows and characters of one part of COPY's input. The driver keeps a buffer for the largest part.
_COPY_ROWS, _COPY_CHARACTERS = 200, 65_536
#: Rows of a statement with a parameter for each value. More rows are not faster.
_BOUND_ROWS = 100


def skipping_insert(database: Database) -> Any:
    """Return the INSERT that skips rows which exist; None on MySQL. Unused dialects are not
    imported."""
    backend = database.url.get_backend_name()
    if not database.can.insert_or_skip:
        return None
    return import_module(f"sqlalchemy.dialects.{backend}").insert


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
        self._dialect = database.url.get_backend_name()
        self._can_copy = database.can.copy
        self._binds = database.can.binds_values
        self._schema = schema
        self._table = schema.tasks
        #: The statement of each set of columns in which the rows differ.
        self._statements: dict[tuple[str, ...], Any] = {}

    def __call__(self, on: Any, tasks: Sequence[DelayTask]) -> None:
        rows = new_values(tasks, self._schema)
        if self._can_copy and _is_psycopg2(on):
            self._copy(on, rows)
        elif self._binds and isinstance(on, Connection) and not on._is_autocommit_isolation():
            self._bind(on, rows)
        else:
            self._insert_all(on, rows)

    def _bind(self, on: Connection, rows: Iterator[tuple[Any, ...]]) -> None:
        """Insert by one fixed statement, since the driver keeps a statement and its last
        parameters.

        The remaining rows, and rows that are too large to be kept, are sent as JSON.
        """
        marks = f"({', '.join('?' * len(NEW_COLUMNS))})"
        statement = f"INSERT INTO {self._target(on)} VALUES {', '.join([marks] * _BOUND_ROWS)}"
        bound, left = functools.cache(self._bound), list[tuple[Any, ...]]()
        while some := list(itertools.islice(rows, _BOUND_ROWS)):
            if (
                len(some) < _BOUND_ROWS
                or sum(len(row[_BODY]) + len(row[_HEADERS] or "") for row in some) > MAX_TEXT
            ):
                left += some
                continue
            values: list[Any] = []
            for id, body, *others in some:
                values += (id, body, *bound(others[0]), *bound(*others[1:]))
            on.exec_driver_sql(statement, tuple(values))
        self._insert_all(on, left)

    def _bound(self, *values: Any) -> Sequence[Any]:
        return [self._text(value) if isinstance(value, datetime) else value for value in values]

    def _insert_all(self, on: Any, rows: Iterable[tuple[Any, ...]]) -> None:
        for part in parts(rows, _size):
            self._insert(on, part)

    def _insert(self, on: Any, stored: Sequence[tuple[Any, ...]]) -> None:
        columns = dict(zip(NEW_COLUMNS, zip(*stored, strict=True), strict=True))
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
        statement = self._statements.get(own)
        if statement is None:
            w = json_rows(self._dialect, own)
            values = [
                w.c[name] if name in own else bindparam(name, type_=self._table.c[name].type)
                for name in columns
            ]
            statement = self._statements[own] = insert(self._table).from_select(
                [*columns], select(*values)
            )
        if "status" in common:
            common["status"] = int(common["status"])
        on.execute(statement, {**common, "rows": dump_json(rows)})

    def _is_instant(self, name: str) -> bool:
        return isinstance(self._table.c[name].type, UTCDateTime)

    def _text(self, instant: datetime | None) -> str | None:
        return instant_text(self._dialect, instant)

    def _copy(self, on: Connection, rows: Iterable[tuple[Any, ...]]) -> None:
        driver: Any = on.dialect.dbapi
        cursor: Any = on.connection.cursor()
        text = _CopyText(rows)
        try:
            cursor.copy_expert(f"COPY {self._target(on)} FROM STDIN", text)
        except driver.Error as error:
            if text.interrupted is not None:
                raise text.interrupted from None
            raise as_sqlalchemy_error(on, "COPY", error) from error
        finally:
            cursor.close()

    def _target(self, on: Connection) -> str:
        return (
            f"{on.dialect.identifier_preparer.format_table(self._table)} ({', '.join(NEW_COLUMNS)})"
        )


def _is_psycopg2(on: Any) -> bool:
    return isinstance(on, Connection) and on.dialect.driver == "psycopg2"


_BODY, _HEADERS = NEW_COLUMNS.index("message_body"), NEW_COLUMNS.index("headers")


def _size(row: tuple[Any, ...]) -> int:
    """Return the bytes that the row adds to a statement."""
    return _OTHERS + _bytes(row[_BODY]) + _bytes(row[_HEADERS] or "")


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def is_duplicate(error: exc.IntegrityError) -> bool:
    first = error.orig.args[0] if error.orig is not None and error.orig.args else None
    codes = (getattr(error.orig, "pgcode", None), getattr(error.orig, "sqlstate", None), first)
    return "23505" in codes or 1062 in codes or (isinstance(first, str) and "UNIQUE" in first)


_SPECIAL = re.compile(r"[\\\t\n\r]")
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


class _CopyText:
    """COPY's input, made while the database reads the part before. Values that rows share are
    formatted once."""

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        #: The exception of Ctrl-C or of a time limit, which the driver turns into an error of the
        #: database.
        self.interrupted: BaseException | None = None
        parts = self._parts(iter(rows))
        next(parts)
        #: The generator's own method: an exception that arrived while the driver was sending is
        #: raised inside the generator, not before it.
        self.read = parts.send

    def _parts(self, rows: Iterator[tuple[Any, ...]]) -> Generator[str, int, None]:
        known: dict[Any, str] = {}
        try:
            yield ""
            while True:
                yield _part(rows, known)
        except BaseException as error:
            self.interrupted = error
            raise


def _part(rows: Iterator[tuple[Any, ...]], known: dict[Any, str]) -> str:
    """Return the lines of the next rows; an empty text at their end."""
    lines: list[str] = []
    size = 0
    for row in itertools.islice(rows, _COPY_ROWS):
        id, body, due = row[:DIFFERING_COLUMNS]
        common = row[DIFFERING_COLUMNS:]
        if due not in known:
            known[due] = str(due)
        if common not in known:
            known[common] = "\t".join(map(_field, common))
        line = f"{id}\t{_field(body)}\t{known[due]}\t{known[common]}\n"
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
