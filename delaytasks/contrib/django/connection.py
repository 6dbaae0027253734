"""Runs the statements of delaytasks on a Django connection, in its transaction and query log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any
from zoneinfo import ZoneInfo

from django.db import IntegrityError, transaction
from sqlalchemy import exc
from sqlalchemy.engine import Dialect, IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.types import TypeEngine

from delaytasks.storage.types import UTCDateTime

ReadValue = Callable[[Any], Any]


class DjangoConnection:
    """Has the methods that the storage calls on a caller's SQLAlchemy connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._dialect = dialect_of(connection)
        #: The id of the last written row, for an error that says that its outcome is unknown.
        self.written_id: int | None = None

    @property
    def dialect(self) -> Dialect:
        return self._dialect

    def begin_nested(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = transaction.atomic(using=self._connection.alias)
        return context

    def in_transaction(self) -> bool:
        return bool(self._connection.in_atomic_block)

    def execute(self, statement: Any, parameters: Any = None, /) -> StatementResult:
        if parameters and "id" in parameters:
            self.written_id = parameters["id"]
        sql, values = self._compile(statement, parameters)
        with self._connection.cursor() as cursor:
            return self._result(cursor, statement, sql, values)

    def exec_driver_sql(self, sql: str) -> StatementResult:
        """Execute SQL that has its values in it."""
        with self._connection.cursor() as cursor:
            cursor.execute(sql, [])
            names = [column[0] for column in cursor.description]
            return StatementResult(names, cursor.fetchall(), cursor.rowcount)

    def peek(self, statement: Any) -> StatementResult:
        """Execute a SELECT that Django's query log and `assertNumQueries` do not see."""
        sql, values = self._compile(statement, None)
        self._connection.ensure_connection()
        with (
            self._connection.wrap_database_errors,
            closing(self._connection.create_cursor()) as cursor,
        ):
            return self._result(cursor, statement, sql, values)

    def _compile(
        self, statement: Any, parameters: Mapping[str, Any] | None
    ) -> tuple[str, list[Any]]:
        if parameters:
            compiled = _compile_template(statement, self._dialect, tuple(parameters))
        else:  # a statement with its values in it is executed once, so it is not cached
            compiled = statement.compile(dialect=self._dialect)
        state = compiled.construct_expanded_state(parameters or {})
        values = []
        for name in state.positiontup:
            process = state.processors.get(name)
            if process is None and name in compiled.binds:
                kind = compiled.binds[name].type.dialect_impl(self._dialect)
                process = kind.bind_processor(self._dialect)
            value = state.parameters[name]
            values.append(value if process is None else process(value))
        return state.statement, values

    def _result(self, cursor: Any, statement: Any, sql: str, values: list[Any]) -> StatementResult:
        try:
            # Also an empty list: only with parameters do cursors read "%%" as one percent sign.
            cursor.execute(sql, values)
        except IntegrityError as error:
            raise self._integrity_error(sql, error) from error
        columns = statement.selected_columns if cursor.description else ()
        codes = [column[1] for column in cursor.description or ()]
        readers = [
            self._reader(column.type, code) for column, code in zip(columns, codes, strict=True)
        ]
        rows = [self._read(readers, row) for row in cursor.fetchall()] if columns else []
        return StatementResult([column.key for column in columns], rows, cursor.rowcount)

    def _integrity_error(self, sql: str, error: IntegrityError) -> exc.IntegrityError:
        """Return SQLAlchemy's error for the driver's error, which identifies a duplicate."""
        cause: Any = error.__cause__ or error
        if self._connection.vendor == "postgresql" and not hasattr(cause, "pgcode"):
            cause.pgcode = cause.sqlstate  # psycopg 3
        return exc.IntegrityError(sql, None, cause)

    @staticmethod
    def _read(readers: Sequence[ReadValue | None], row: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            read(value) if read else value for read, value in zip(readers, row, strict=True)
        )

    def _reader(self, kind: TypeEngine[Any], code: Any) -> ReadValue | None:
        """Return what reads the values of a column. `code` is the driver's code of its type."""
        process: ReadValue | None = kind.dialect_impl(self._dialect).result_processor(
            self._dialect, code
        )
        if not isinstance(kind, UTCDateTime):
            return process

        def read(value: Any) -> Any:
            if not isinstance(value, datetime):
                return value if process is None else process(value)
            # Without USE_TZ, psycopg returns naive datetimes in the time zone of the session.
            if value.tzinfo is None and self._connection.vendor == "postgresql":
                value = value.replace(tzinfo=ZoneInfo(self._connection.timezone_name))
            return kind.process_result_value(value, self._dialect)

        return read


class StatementResult(IteratorResult[Any]):
    """A SQLAlchemy result of rows that are fetched already, so that the cursor is free."""

    def __init__(
        self, names: Sequence[str], rows: Sequence[tuple[Any, ...]], rowcount: int
    ) -> None:
        super().__init__(SimpleResultMetaData(names), iter(rows))
        self.rowcount = rowcount


def dialect_of(connection: Any) -> Dialect:
    """Return the SQLAlchemy dialect whose statements Django's cursor accepts."""
    is_psycopg3 = connection.vendor == "postgresql" and connection.Database.__name__ == "psycopg"
    return _dialect("psycopg" if is_psycopg3 else connection.vendor)


@lru_cache
def _dialect(name: str) -> Dialect:
    if name == "psycopg":
        from sqlalchemy.dialects.postgresql import psycopg

        return psycopg.dialect(paramstyle="format")
    made: Dialect = import_module(f"sqlalchemy.dialects.{name}").dialect(paramstyle="format")
    return made


@lru_cache(maxsize=64)
def _compile_template(statement: Any, dialect: Dialect, names: tuple[str, ...]) -> Any:
    """Compile a statement of the storage, which is the same object each time."""
    return statement.compile(dialect=dialect, column_keys=names)
