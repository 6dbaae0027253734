"""Runs delaytasks' statements on a connection of Django's: same transaction, same log, same query counts."""

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

TablePoller = Callable[[Any], Any]


class DjangoExecutor:
    """What the store needs of a SQLAlchemy connection: `execute` and `begin_nested`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._dialect = dialect_of(connection)
        #: The id of the row that was written last, if the outcome of its transaction should be unknown.
        self.written_id: int | None = None

    def begin_nested(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = transaction.atomic(using=self._connection.alias)
        return context

    def in_transaction(self) -> bool:
        return bool(self._connection.in_atomic_block)

    def execute(self, statement: Any, parameters: Any = None, /) -> Result:
        if parameters and "id" in parameters:
            self.written_id = parameters["id"]
        sql, values = self._compile(statement, parameters)
        with self._connection.cursor() as cursor:
            return self._result(cursor, statement, sql, values)

    def peek(self, statement: Any) -> Result:
        """As `execute`, unseen by Django's query log, and so by `assertNumQueries`."""
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
        else:  # its values are part of it: nobody sends it twice
            compiled = statement.compile(dialect=self._dialect)
        state = compiled.construct_expanded_state(parameters or {})
        values = []
        for name in state.positiontup:
            process = state.processors.get(name)
            if process is None and name in compiled.binds:
                process = (
                    compiled.binds[name]
                    .type.dialect_impl(self._dialect)
                    .bind_processor(self._dialect)
                )
            value = state.parameters[name]
            values.append(value if process is None else process(value))
        return state.statement, values

    def _result(self, cursor: Any, statement: Any, sql: str, values: list[Any]) -> Result:
        try:
            # A list even when it is empty: only then do cursors take a doubled percent sign for one.
            cursor.execute(sql, values)
        except IntegrityError as error:
            raise self._integrity_error(sql, error) from error
        columns = statement.selected_columns if cursor.description else ()
        readers = [self._reader(column.type) for column in columns]
        rows = [self._read(readers, row) for row in cursor.fetchall()] if columns else []
        return Result([column.key for column in columns], rows, cursor.rowcount)

    def _integrity_error(self, sql: str, error: IntegrityError) -> exc.IntegrityError:
        """The store tells a duplicate by the driver's error, which Django keeps as the cause."""
        cause: Any = error.__cause__ or error
        if self._connection.vendor == "postgresql" and not hasattr(cause, "pgcode"):
            cause.pgcode = cause.sqlstate  # psycopg 3
        return exc.IntegrityError(sql, None, cause)

    @staticmethod
    def _read(readers: Sequence[TablePoller | None], row: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            read(value) if read else value for read, value in zip(readers, row, strict=True)
        )

    def _reader(self, kind: TypeEngine[Any]) -> TablePoller | None:
        process: TablePoller | None = kind.dialect_impl(self._dialect).result_processor(
            self._dialect, None
        )
        if not isinstance(kind, UTCDateTime):
            return process

        def read(value: Any) -> Any:
            if not isinstance(value, datetime):
                return value if process is None else process(value)
            # Django's driver made it. Without USE_TZ, PostgreSQL's instants come in the session's zone, unnamed.
            if value.tzinfo is None and self._connection.vendor == "postgresql":
                value = value.replace(tzinfo=ZoneInfo(self._connection.timezone_name))
            return kind.process_result_value(value, self._dialect)

        return read


class Result(IteratorResult[Any]):
    """SQLAlchemy's own kind of result, over rows that are fetched already, so that the cursor is free."""

    def __init__(
        self, names: Sequence[str], rows: Sequence[tuple[Any, ...]], rowcount: int
    ) -> None:
        super().__init__(SimpleResultMetaData(names), iter(rows))
        self.rowcount = rowcount


def dialect_of(connection: Any) -> Dialect:
    """SQLAlchemy's dialect for what Django's cursor takes."""
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
    """The store keeps its statements, so most are compiled once."""
    return statement.compile(dialect=dialect, column_keys=names)
