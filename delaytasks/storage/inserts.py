"""INSERT in the ways that each database is best at: one row unless it exists, and many rows at once."""

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
from delaytasks.storage.driver_errors import told
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.rows import (
    DIFFERING,
    MAX_TEXT,
    NEW_COLUMNS,
    instant_text,
    json_rows,
    new_values,
    parts,
)
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import UTCDateTime

#: Bytes of a row's other columns, with their names.
_OTHERS = 500
#: Rows that COPY is given at a time, and characters, since the driver keeps room for the most that it ever had.
_AT_ONCE, _MOST_AT_ONCE = 200, 65_536
#: Rows of a statement with a parameter for each value: more are not faster.
_BOUND = 100


def skipping_insert(database: Database) -> Any:
    """The INSERT that can pass over rows that exist; None on MySQL. Dialects that are not used are not imported."""
    backend = database.url.get_backend_name()
    if not database.can.insert_or_skip:
        return None
    return import_module(f"sqlalchemy.dialects.{backend}").insert


class Insert:
    """INSERT into one table; a row that exists is passed over."""

    def __init__(self, database: Database, table: Table, names: Sequence[str]) -> None:
        self._db = database
        self._names = names
        skipping = skipping_insert(database)
        statement = skipping(table).on_conflict_do_nothing() if skipping else insert(table)
        # Without this option SQLAlchemy does not read the count on psycopg 3 and asyncpg, and says -1.
        self._statement = statement.execution_options(preserve_rowcount=True)
        self._prepared = Prepared(database, self._statement, names=names)

    def __call__(self, on: Any, values: dict[str, Any]) -> bool:
        """True if the row is new."""
        try:
            if self._db.owns(on):
                return bool(self._prepared(on, values).met)
            if _is_psycopg2(on):  # a caller's, on which nothing of ours is left behind
                return bool(on.exec_driver_sql(self._written, values).rowcount)
            return bool(on.execute(self._statement, values).rowcount)
        except exc.IntegrityError as error:
            self._check_duplicate(error)
            return False

    def alone(self, values: dict[str, Any]) -> bool:
        """As a call, on a connection of our own where each statement is a transaction."""
        with self._db.auto.connect() as connection:
            try:
                return bool(self._prepared(connection, values).met)
            except exc.IntegrityError as error:
                self._check_duplicate(error)
                return False

    def _check_duplicate(self, error: exc.IntegrityError) -> None:
        """Raise `error` again unless it is how this database reports a row that exists."""
        if self._db.can.insert_or_skip or not is_duplicate(error):
            raise error

    @functools.cached_property
    def _written(self) -> str:
        """As SQLAlchemy would write it out again for each row."""
        from sqlalchemy.dialects.postgresql import psycopg2

        dialect: Any = psycopg2.dialect()  # type: ignore[no-untyped-call]
        return str(self._statement.compile(dialect=dialect, column_keys=self._names))


class BulkInsert:
    """INSERT of many new tasks: by COPY where there is one, with a parameter for each value where no server is asked,
    else with one JSON parameter for many. What they have in common is put into words once."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._dialect = database.url.get_backend_name()
        self._can_copy = database.can.copy
        self._binds = database.can.binds_values
        self._schema = schema
        self._table = schema.tasks
        #: By the columns in which the rows differ.
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
        """By one statement alone, as the driver keeps it, with what was bound to it last: rows that are left, and those
        that are too large for that, go the other way."""
        marks = f"({', '.join('?' * len(NEW_COLUMNS))})"
        statement = f"INSERT INTO {self._target(on)} VALUES {', '.join([marks] * _BOUND)}"
        bound, left = functools.cache(self._bound), list[tuple[Any, ...]]()
        while some := list(itertools.islice(rows, _BOUND)):
            if (
                len(some) < _BOUND
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
        return [self._said(value) if isinstance(value, datetime) else value for value in values]

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
        said = [
            map(self._said, columns[name]) if self._is_instant(name) else columns[name]
            for name in own
        ]
        rows = [dict(zip(own, row, strict=True)) for row in zip(*said, strict=True)]
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

    def _said(self, instant: datetime | None) -> str | None:
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
            raise told(on, "COPY", error) from error
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
    """What it adds to a statement, in bytes."""
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
    """What COPY reads, made while the database takes in what was read before. What rows have in common is put into
    words once."""

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        #: By Ctrl-C or a time limit, of which the driver makes an error of the database's.
        self.interrupted: BaseException | None = None
        parts = self._parts(iter(rows))
        next(parts)
        #: A generator's own: what waited while the driver was sending is raised inside it, and not before it.
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
    """The next rows; nothing at their end."""
    lines: list[str] = []
    size = 0
    for row in itertools.islice(rows, _AT_ONCE):
        id, body, due = row[:DIFFERING]
        common = row[DIFFERING:]
        if due not in known:
            known[due] = str(due)
        if common not in known:
            known[common] = "\t".join(map(_word, common))
        line = f"{id}\t{_word(body)}\t{known[due]}\t{known[common]}\n"
        lines.append(line)
        size += len(line)
        if size > _MOST_AT_ONCE:
            break
    return "".join(lines)


def _word(value: Any) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        return value.translate(_ESCAPES) if _SPECIAL.search(value) else value
    return str(int(value)) if isinstance(value, int) else str(value)
