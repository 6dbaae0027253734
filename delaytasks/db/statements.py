"""Statements of the hot path: prepared by the driver, and INSERT of one and of many rows.

Claims, settlements and inserts are executed so often that SQLAlchemy's part would be most of their
work. On PostgreSQL most of them are parsed and planned once for each connection.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from sqlalchemy import URL, Connection, Table, bindparam, delete, exc, false, func, insert, select

from delaytasks.db.database import Database, is_readable
from delaytasks.db.engines import (
    DUPLICATE,
    PREPARED_IS_GONE,
    as_sqlalchemy_error,
    make_engine,
    unknown_outcome,
)
from delaytasks.db.schema import ATTRIBUTES, BODY, RESULT, Schema, columns, instant_text, json_rows
from delaytasks.db.types import UTCDateTime
from delaytasks.model.body import dump_json
from delaytasks.model.errors import DuplicateTaskError, StoreUnavailableError
from delaytasks.model.moves import Status
from delaytasks.model.task import CallerConnection, DelayedTask

T = TypeVar("T")

# -- The differences between psycopg2 and psycopg 3 that SQLAlchemy does not hide -----------------

# SQLAlchemy sends most statements. COPY, prepared statements and notices go directly to the
# driver.


class PostgresqlDriver:
    """psycopg2."""

    def time_zone(self, connection: Any) -> str | None:
        """Return the session's time zone, which the server reports without a query."""
        zone: str | None = connection.get_parameter_status("TimeZone")
        return zone

    def cursor(self, connection: Any) -> Any:
        """Return a cursor that puts the parameters into the text, which EXECUTE requires."""
        return connection.cursor()

    def copy(self, cursor: Any, statement: str, parts: Iterator[str]) -> None:
        """Execute COPY FROM STDIN with the text of `parts`."""
        text = _CopyFile(parts)
        try:
            cursor.copy_expert(statement, text)
        except Exception:
            if text.interrupted is not None:
                raise text.interrupted from None
            raise

    def notices(self, connection: Any, timeout_s: float) -> Sequence[str]:
        """Return the payloads of the notices that have arrived, as soon as there is one."""
        if not connection.notifies:
            if not is_readable(connection.fileno(), timeout_s):
                return ()
            connection.poll()
        payloads = [notice.payload for notice in connection.notifies]
        connection.notifies.clear()
        return payloads


class _CopyFile:
    """The input of psycopg2's COPY, which is made while the database reads the part before."""

    def __init__(self, parts: Iterator[str]) -> None:
        #: The exception of Ctrl-C or of a time limit, which the driver turns into an error of the
        #: database.
        self.interrupted: BaseException | None = None
        reader = self._read(parts)
        next(reader)
        #: The generator's own method: an exception that arrived while the driver was sending is
        #: raised inside the generator, not before it.
        self.read = reader.send

    def _read(self, parts: Iterator[str]) -> Generator[str, int, None]:
        try:
            yield ""
            while True:
                yield next(parts, "")
        except BaseException as error:
            self.interrupted = error
            raise


class Psycopg3(PostgresqlDriver):
    def time_zone(self, connection: Any) -> str | None:
        zone: str | None = connection.info.parameter_status("TimeZone")
        return zone

    def cursor(self, connection: Any) -> Any:
        from psycopg import ClientCursor

        return ClientCursor(connection)

    def copy(self, cursor: Any, statement: str, parts: Iterator[str]) -> None:
        with cursor.copy(statement) as copy:
            for part in parts:
                copy.write(part)

    def notices(self, connection: Any, timeout_s: float) -> Sequence[str]:
        return [notice.payload for notice in connection.notifies(timeout=timeout_s, stop_after=1)]


#: By the name of SQLAlchemy's driver.
_BY_NAME: dict[str, PostgresqlDriver] = {"psycopg2": PostgresqlDriver(), "psycopg": Psycopg3()}


def own_driver(url: URL) -> PostgresqlDriver:
    """Return the driver of our own connections to a PostgreSQL database."""
    return _BY_NAME[url.get_driver_name()]


def driver_of(connection: Any) -> PostgresqlDriver | None:
    """Return the driver of a SQLAlchemy connection, or None if it is neither of the two."""
    if not isinstance(connection, Connection) or connection.dialect.is_async:
        return None
    return _BY_NAME.get(connection.dialect.driver)


# -- Prepared statements --------------------------------------------------------------------------


#: We ask for UTC, but a pooler may ignore it. Many servers use UTC anyway.
_UTC = {"UTC", "Etc/UTC"}


class Answer(NamedTuple):
    rows: Sequence[Sequence[Any]]
    #: The number of rows that the statement changed or returned.
    row_count: int


class _Texts(NamedTuple):
    """The texts of a statement. Parameters that are constant are written into `execute`."""

    #: Empty for a statement that is not prepared.
    prepare: str
    execute: str
    #: The names of the other parameters, in order.
    names: Sequence[str]


class Prepared:
    """One statement for all connections. Where it cannot be prepared, it is executed normally.

    With `is_planned_once=False` PostgreSQL plans it at each execution, and only SQLAlchemy's part
    of the work is saved.

    Behind a pooler that gives each statement another server connection, a prepared statement is not
    found. The first such error ends the transaction, which has to be tried again, and switches this
    statement to normal execution for the rest of the process.
    """

    def __init__(
        self,
        database: Database,
        statement: Any,
        is_planned_once: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        self.statement = statement
        #: The columns to which an INSERT gives values.
        self._names = names
        self._is_planned_once = is_planned_once
        self._is_on = database.can.prepare
        self._made_texts: _Texts | None = None

    def __call__(self, on: Connection, values: Mapping[str, Any]) -> Answer:
        driver = self._driver(on)
        if driver is None:
            result = on.execute(self.statement, values)
            return Answer(result.all() if result.returns_rows else (), result.rowcount)
        link: Any = on.connection
        dbapi: Any = on.dialect.dbapi
        try:
            with driver.cursor(link.driver_connection) as cursor:
                prepare, execute, names = self._made_texts or self._make_texts(cursor)
                if self._is_planned_once and prepare not in link.info:
                    cursor.execute(prepare)
                    link.info[prepare] = True
                cursor.execute(execute, [_sent(values[name]) for name in names])
                return Answer(cursor.fetchall() if cursor.description else (), cursor.rowcount)
        except dbapi.Error as error:
            self._is_on = not PREPARED_IS_GONE.caused(error)
            if self._is_on or not link.driver_connection.autocommit:
                raise as_sqlalchemy_error(on, "EXECUTE", error) from error
        return self(on, values)

    def _driver(self, on: Connection) -> PostgresqlDriver | None:
        """Return the driver of `on` if the statement can be prepared there, else None."""
        driver = driver_of(on) if self._is_on else None
        if driver is None:
            return None
        # The driver returns instants in the session's time zone, which only SQLAlchemy converts.
        return driver if driver.time_zone(on.connection.driver_connection) in _UTC else None

    def _make_texts(self, cursor: Any) -> _Texts:
        from sqlalchemy.dialects import postgresql

        dialect: Any = postgresql.dialect(  # type: ignore[no-untyped-call]
            paramstyle="numeric_dollar" if self._is_planned_once else "format"
        )
        compiled = self.statement.compile(dialect=dialect, column_keys=self._names)
        is_given = {name: compiled.binds[name].required for name in compiled.positiontup}
        places = [
            "%s" if is_given[name] else _literal(cursor, compiled.params[name])
            for name in compiled.positiontup
        ]
        if self._is_planned_once:
            # The name depends on the text. Else another release on the same server connection would
            # execute our statement.
            name = f"delaytasks_{crc32(compiled.string.encode()):08x}"
            prepare = f"PREPARE {name} AS {compiled.string}"
            execute = f"EXECUTE {name} ({', '.join(places)})"
        else:
            prepare, execute = "", compiled.string.replace("%%", "%%%%") % tuple(places)
        names = [name for name in compiled.positiontup if is_given[name]]
        self._made_texts = _Texts(prepare, execute, names)
        return self._made_texts


def _literal(cursor: Any, value: Any) -> str:
    """Return a constant as the driver writes it into a statement."""
    written: str | bytes = cursor.mogrify("%s", [value])
    text = written.decode() if isinstance(written, bytes) else written
    return text.replace("%", "%%")


def _sent(value: Any) -> Any:
    """Return a list of numbers or instants as one text, which PostgreSQL reads faster than an
    expression."""
    if not isinstance(value, list):
        return value
    return "{" + ",".join(["NULL" if item is None else str(item) for item in value]) + "}"


# -- Rows as tasks ---------------------------------------------------------------------------------


def task_of(row: Sequence[Any], schema: Schema) -> DelayedTask:
    cipher = schema.cipher
    body = row[2] if cipher is None else cipher.read(row[2], BODY, row[0], row[1])
    task = DelayedTask(row[0], row[1], body, row[3], Status(row[4]), *row[5:])
    if cipher is not None and task.result_json is not None:
        task.result_json = cipher.read(task.result_json, RESULT, task.id, task.tag)
    return task


# -- INSERT in the fastest way of each database ---------------------------------------------------


#: Bytes of texts in one statement. Quoted for JSON and then for SQL they may be several times as
#: long, and MariaDB accepts 16 MB.
MAX_TEXT = 2_000_000
#: The columns of a new row. The first ones differ in nearly all rows, or are NULL.
NEW_COLUMNS = tuple(
    "id message_body expected_time task_key tag status version delay_time create_time update_time "
    "queue priority headers limit_key meta".split()
)
DIFFERING_COLUMNS = 4
_BODY, _TAG, _HEADERS = map(NEW_COLUMNS.index, ("message_body", "tag", "headers"))
#: A new row was updated when it was created.
_values_of = attrgetter(
    *(ATTRIBUTES["create_time" if name == "update_time" else name] for name in NEW_COLUMNS)
)
#: Bytes of a row's other columns, with their names.
_OTHERS = 500
#: Rows and characters of one part of COPY's input. The driver keeps a buffer for the largest part.
_COPY_ROWS, _COPY_CHARACTERS = 200, 65_536


def new_values(tasks: Iterable[DelayedTask], schema: Schema) -> Iterator[tuple[Any, ...]]:
    """Yield the values of the columns of new rows as they are stored."""
    rows, cipher = map(_values_of, tasks), schema.cipher
    if cipher is None:
        return rows
    return ((row[0], cipher.seal(row[1], BODY, row[0], row[_TAG]), *row[2:]) for row in rows)


def parts(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Split `items` into lists that one statement can carry each, in their order."""
    part: list[T] = []
    size = 0
    for item in items:
        length = size_of(item)
        if part and size + length > MAX_TEXT:
            yield part
            part, size = [], 0
        part.append(item)
        size += length
    if part:
        yield part


def values_of(task: DelayedTask, schema: Schema) -> dict[str, Any]:
    """Return the row of a new task by column."""
    row = dict(zip(NEW_COLUMNS, next(new_values([task], schema)), strict=True))
    row["status"] = int(task.status)
    return row


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


def write_nothing(on: Any, table: Table) -> None:
    """Execute a statement that writes, so that SQLite's driver begins a transaction."""
    on.execute(delete(table).where(false()))


#: Without this option SQLAlchemy does not read the count on psycopg 3 and asyncpg, and returns -1.
_COUNTED = {"preserve_rowcount": True}


class Insert:
    """INSERT into one table. A row that exists is skipped."""

    def __init__(self, database: Database, table: Table, names: Sequence[str]) -> None:
        self._db = database
        skipping = skipping_insert(database)
        statement = skipping(table).on_conflict_do_nothing() if skipping else insert(table)
        self._statement = statement.execution_options(**_COUNTED)
        self._prepared = Prepared(database, self._statement, names=names)
        self._names = names
        #: By the name of the driver.
        self._texts: dict[str, str] = {}

    def __call__(self, on: Any, values: dict[str, Any]) -> bool:
        """True if the row is new."""
        try:
            if self._db.owns(on):
                return bool(self._prepared(on, values).row_count)
            # On a caller's connection we leave no prepared statement.
            if driver_of(on) is not None:
                text = self._texts.get(on.dialect.driver) or self._compile(on.dialect)
                return bool(on.exec_driver_sql(text, values, _COUNTED).rowcount)
            return bool(on.execute(self._statement, values).rowcount)
        except exc.IntegrityError as error:
            if self._db.can.insert_or_skip or not DUPLICATE.caused(error.orig):
                raise
            return False  # this is how the database reports a row that exists

    def _compile(self, dialect: Any) -> str:
        """Return the text, which SQLAlchemy executes in less time than the statement."""
        text = str(self._statement.compile(dialect=dialect, column_keys=self._names))
        self._texts[dialect.driver] = text
        return text


class BulkInsert:
    """INSERT of many new tasks.

    PostgreSQL reads them by COPY, the other databases from one JSON parameter for many rows. Values
    that all rows share are sent once.
    """

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._schema = schema
        self._table = schema.tasks
        #: The statement for each set of columns in which the rows differ.
        self._statements: dict[tuple[str, ...], Any] = {}

    def __call__(self, on: Any, tasks: Sequence[DelayedTask]) -> None:
        rows = new_values(tasks, self._schema)
        driver = driver_of(on) if self._db.can.copy else None
        if driver is not None:
            self._copy(on, driver, rows)
            return
        for part in parts(rows, _size):
            self._insert(on, part)

    def _insert(self, on: Any, stored: Sequence[tuple[Any, ...]]) -> None:
        found = dict(zip(NEW_COLUMNS, zip(*stored, strict=True), strict=True))
        common = {
            name: values[0]
            for name, values in found.items()
            if name != "id" and len(set(values)) == 1
        }
        own = tuple(name for name in found if name not in common)
        for name in own:
            if isinstance(self._table.c[name].type, UTCDateTime):
                found[name] = tuple(instant_text(self._db, instant) for instant in found[name])
        texts = zip(*(found[name] for name in own), strict=True)
        rows = [dict(zip(own, row, strict=True)) for row in texts]
        statement = self._statements.get(own)
        if statement is None:
            w = json_rows(self._db, own)
            values = [
                w.c[name] if name in own else bindparam(name, type_=self._table.c[name].type)
                for name in NEW_COLUMNS
            ]
            statement = self._statements[own] = insert(self._table).from_select(
                NEW_COLUMNS, select(*values)
            )
        if "status" in common:
            common["status"] = int(common["status"])
        on.execute(statement, {**common, "rows": dump_json(rows)})

    def _copy(
        self, on: Connection, driver: PostgresqlDriver, rows: Iterator[tuple[Any, ...]]
    ) -> None:
        table = on.dialect.identifier_preparer.format_table(self._table)
        statement = f"COPY {table} ({', '.join(NEW_COLUMNS)}) FROM STDIN"
        dbapi: Any = on.dialect.dbapi
        cursor: Any = on.connection.cursor()
        try:
            driver.copy(cursor, statement, _copy_parts(rows))
        except dbapi.Error as error:
            raise as_sqlalchemy_error(on, "COPY", error) from error
        finally:
            cursor.close()


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


class NewRows:
    """Inserts tasks without a key, alone or together.

    If a row exists, an earlier try of the same call may have written it, and its answer was lost.
    """

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._schema = schema
        #: Inserts one row. Returns False if there is a row with its id.
        self.add = Insert(database, schema.tasks, NEW_COLUMNS)
        self._insert_many = BulkInsert(database, schema)
        id = schema.tasks.c.id
        self._get = select(*columns(schema)).where(id == bindparam("task_id"))

    def insert(self, task: DelayedTask, on: CallerConnection | None = None) -> bool:
        """Insert one row. Return False if another task has its id."""
        add = functools.partial(self.add, values=values_of(task, self._schema))
        is_new = add(on) if on is not None else self._db.repeat(add, self._db.connect, task.id)
        return is_new or self.was_written(task, on)

    def insert_many(self, tasks: Sequence[DelayedTask], on: CallerConnection | None = None) -> bool:
        """Insert all rows together. Return False, and insert no row, if one of the ids exists."""

        def work(connection: Any) -> None:
            try:
                with self.savepoint(on):
                    self._insert_many(connection, tasks)
            except exc.IntegrityError as error:
                # Where each statement is a transaction, the first rows may be there.
                if not DUPLICATE.caused(error.orig) or _commits_each_statement(connection):
                    raise
                raise DuplicateTaskError("an id is taken") from error

        try:
            self._db.transaction(work, on, tasks[0].id)
        except DuplicateTaskError:
            return self.was_written(tasks[0], on)
        return True

    def was_written(self, task: DelayedTask, on: CallerConnection | None) -> bool:
        """Return whether the row with the id of `task` was written for it."""

        def read(connection: Any) -> Any:
            return connection.execute(self._get, {"task_id": task.id}).first()

        try:
            row = self._db.autocommitted(read, on)
        except StoreUnavailableError as error:
            raise unknown_outcome(str(error), task.id) from error
        found = None if row is None else task_of(row, self._schema)
        return found is not None and (found.tag, found.body_json, found.create_time) == (
            task.tag,
            task.body_json,
            task.create_time,
        )

    def savepoint(self, on: Any) -> AbstractContextManager[Any]:
        """Begin a savepoint on the caller's connection.

        Our own transactions, and connections that commit each statement, need no savepoint.
        """
        if on is None or _commits_each_statement(on):
            return nullcontext()
        if self._db.can.begins_late:
            # Without a statement that writes, the end of the savepoint would commit.
            write_nothing(on, self._schema.tasks)
        context: AbstractContextManager[Any] = on.begin_nested()
        return context


def _commits_each_statement(on: Any) -> bool:
    return isinstance(on, Connection) and on._is_autocommit_isolation()


# -- notices --------------------------------------------------------------------------------------

# Messages that a commit sends to the connections that listen (LISTEN and NOTIFY of PostgreSQL).


#: PostgreSQL's limit for the name of a channel.
MAX_CHANNEL_BYTES = 63


class Notices:
    """The channel of the tasks of a database."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        name = f"delaytasks.{schema.tasks.fullname}"
        self.channel = (
            name if len(name) <= MAX_CHANNEL_BYTES else f"delaytasks.{crc32(name.encode()):08x}"
        )
        self._tell = select(func.pg_notify(self.channel, ""))

    @property
    def is_possible(self) -> bool:
        return self._db.can.notify

    def send(self, on: CallerConnection | None = None) -> None:
        """Send a notice at the commit of `on`, or immediately without `on`."""
        if self.is_possible:
            self._db.autocommitted(lambda connection: connection.execute(self._tell), on)

    def listen(self) -> Listener | None:
        """Return a listener; None if the database has no notices."""
        return Listener(self._db, self.channel) if self.is_possible else None


class Listener:
    """A connection that receives the payloads sent since it was made.

    After an exception, which is the driver's own, a new listener is needed.
    """

    def __init__(self, database: Database, channel: str) -> None:
        self._engine = make_engine(database.url, 1, "AUTOCOMMIT")
        self._driver = own_driver(database.url)
        try:
            self._connection = self._engine.connect()
            name = self._connection.dialect.identifier_preparer.quote_identifier(channel)
            with database.bounded(self._connection):
                self._connection.exec_driver_sql(f"LISTEN {name}")
        except BaseException:
            self._engine.dispose()
            raise

    def wait(self, timeout_s: float) -> Sequence[str]:
        """Return the payloads that have arrived, as soon as there is one."""
        return self._driver.notices(self._connection.connection.driver_connection, timeout_s)

    def close(self) -> None:
        self._connection.invalidate()  # in a pool it would continue to listen
        self._connection.close()
        self._engine.dispose()
