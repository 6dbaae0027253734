"""Classifies driver errors: try again, unavailable, outcome unknown, refused."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, exc

from delaytasks.model.errors import (
    DelayTaskError,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
)
from delaytasks.model.text import TABLES_REMEDY

TRIES = 5

#: A prepared statement is missing, exists already or is out of date. It is not used again.
PREPARED_IS_GONE = {"26000", "42P05", "0A000"}
#: Errors after which the same transaction may simply be tried again: serialization failure,
#: deadlock, lock not available.
_RETRY_PG = {"40001", "40P01", "55P03"} | PREPARED_IS_GONE
#: The same: lock wait timeout, deadlock (or a failed certification of Galera), record has changed,
#: rolled back by group replication.
_RETRY_MYSQL = {1205, 1213, 1020, 3101}

#: A server that answers but cannot work now: out of memory, disk or connections, shutting down,
#: failed over.
_UNABLE_PG = ("53", "57", "58", "25006")
#: A server that accepts no writes: it was the primary, or lost its cluster. Another server may be
#: the primary now.
_DEMOTED_PG = {"25006"}
#: Galera's "not ready", read-only servers and sessions, read-only InnoDB, group replication without
#: a majority.
_DEMOTED_MYSQL = {1047, 1290, 1792, 1836, 1874, 3100}
_UNABLE_MYSQL = {1021, 1040, 1053, 1114, 1203, 1226, 1317} | _DEMOTED_MYSQL
#: COMMIT failed. On Galera the other nodes may have the transaction, if this node lost its cluster
#: meanwhile.
_UNSURE_MYSQL = {1180}
#: Tables, columns or schemas are missing. Such a server has no tables, or those of another version.
_MISSING_PG = {"42P01", "42703", "3F000"}
_MISSING_MYSQL = {1146, 1054}
_MISSING_SQLITE = ("no such table", "no such column", "has no column named")
#: A statement reached its time limit: MariaDB, MySQL.
_TIMEOUT_MYSQL = {1969, 3024}
_UNABLE_SQLITE = ("disk is full", "disk I/O error", "readonly database")

#: The attribute of a driver's error that was raised while connecting.
_CONNECTING = "delaytasks_was_connecting"

#: MySQL's errors about values that its driver does not classify as such. Their texts quote the
#: values.
_VALUES_MYSQL = {1062, 1264, 1292, 1366, 1406, 3140, 4025}


def as_sqlalchemy_error(on: Connection, statement: str, error: Exception) -> BaseException:
    """Wrap an error of a statement that was sent past SQLAlchemy. A broken connection is
    invalidated."""
    dialect: Any = on.dialect
    is_broken = dialect.is_disconnect(error, on.connection.driver_connection, None)
    instance = exc.DBAPIError.instance(
        statement,
        None,
        error,
        dialect.dbapi.Error,
        connection_invalidated=is_broken,
        dialect=dialect,
    )
    if is_broken:
        on.invalidate(instance)
    return instance


def first_cause(error: exc.DBAPIError) -> exc.DBAPIError:
    """Return the error that ended the transaction.

    A full disk and a deadlock end the whole transaction, and then a missing savepoint is only the
    consequence.
    """
    before: BaseException | None = error
    while before is not None and "savepoint" in str(getattr(before, "orig", before)).lower():
        before = before.__context__
    return before if isinstance(before, exc.DBAPIError) else error


def mark_as_connecting(driver_error: BaseException) -> None:
    """Remember that no connection came about, so that no statement was refused."""
    driver_error.__dict__[_CONNECTING] = True


def _is_connecting(error: exc.DBAPIError) -> bool:
    return getattr(error.orig, _CONNECTING, False) and not is_conflict(error)


def is_disconnect(error: exc.DBAPIError) -> bool:
    return (
        error.connection_invalidated
        or _is_connecting(error)
        or (
            isinstance(error, (exc.OperationalError, exc.InterfaceError))
            and sqlstate_of(error.orig) in (None, "57P03", "53300")
            and not is_conflict(error)
            and not _is_sqlite(error.orig)
            and not _is_mysql_answer(error)
        )
    )


def is_conflict(error: exc.DBAPIError) -> bool:
    if sqlstate_of(error.orig) in _RETRY_PG:
        return True
    code = _first_of(error.orig)
    return code in _RETRY_MYSQL or (isinstance(code, str) and "database is locked" in code)


def is_demoted(driver_error: object) -> bool:
    """Whether the server accepts no writes, so that a new connection may reach a server that
    does."""
    return sqlstate_of(driver_error) in _DEMOTED_PG or _first_of(driver_error) in _DEMOTED_MYSQL


def is_unsure(error: exc.DBAPIError) -> bool:
    """Whether the statement may have been executed despite the error."""
    return error.connection_invalidated or _first_of(error.orig) in _UNSURE_MYSQL


def is_worth_a_retry(error: exc.DBAPIError) -> bool:
    return is_conflict(error) or is_disconnect(error) or is_demoted(error.orig) or is_unsure(error)


def is_unable(error: exc.DBAPIError) -> bool:
    """Whether the server cannot serve any client now, so that the same statement may succeed
    later."""
    if (sqlstate_of(error.orig) or "").startswith(_UNABLE_PG):
        return True
    code = _first_of(error.orig)
    if isinstance(code, str):
        return _is_sqlite(error.orig) and any(words in code for words in _UNABLE_SQLITE)
    return code in _UNABLE_MYSQL or code in _UNSURE_MYSQL


def is_statement_timeout(error: exc.DBAPIError) -> bool:
    """Whether the database has ended a statement that reached its time limit."""
    first = _first_of(error.orig)
    is_in_sqlite = _is_sqlite(error.orig) and first == "interrupted"
    return is_in_sqlite or sqlstate_of(error.orig) == "57014" or first in _TIMEOUT_MYSQL


def _is_about_values(error: exc.DBAPIError) -> bool:
    return (
        isinstance(error, (exc.IntegrityError, exc.DataError))
        or _first_of(error.orig) in _VALUES_MYSQL
    )


def is_duplicate(error: exc.IntegrityError) -> bool:
    first = _first_of(error.orig)
    is_in_sqlite = isinstance(first, str) and "UNIQUE" in first
    return sqlstate_of(error.orig) == "23505" or first == 1062 or is_in_sqlite


def _is_sqlite(driver_error: object) -> bool:
    return "sqlite3" in type(driver_error).__module__


def _is_mysql_answer(error: exc.DBAPIError) -> bool:
    """Whether a MySQL server answered. Errors of the client have numbers from 2000 to 2999."""
    code = _first_of(error.orig)
    return isinstance(code, int) and not 2000 <= code < 3000


def _first_of(driver_error: object) -> object:
    arguments = getattr(driver_error, "args", ())
    return arguments[0] if arguments else None


def sqlstate_of(driver_error: object) -> str | None:
    """Return the SQLSTATE, which psycopg2 and psycopg 3 or asyncpg (a caller's) name
    differently."""
    return getattr(driver_error, "pgcode", None) or getattr(driver_error, "sqlstate", None)


def reason_of(error: exc.DBAPIError) -> str:
    """Return the first line of the driver's text, since the rest may show the row.

    An error about values may quote them, so its text is replaced by its type and number.
    """
    if _is_about_values(error):
        code = sqlstate_of(error.orig) or getattr(error.orig, "sqlite_errorname", None)
        first = _first_of(error.orig)
        number = code or (first if isinstance(first, int) else "")
        return f"a value cannot be stored, {type(error.orig).__name__} {number}".rstrip()
    return (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]


def forget_details(error: exc.DBAPIError) -> None:
    """Remove values from the driver's error, which stays the cause of ours and is logged with
    it."""
    if _is_about_values(error):
        reason, number = reason_of(error), _first_of(error.orig)
        if error.orig is not None:
            error.orig.args = (number, reason) if isinstance(number, int) else (reason,)
        error.args = (reason,)
        return
    for each in (error, error.orig):
        if each is not None and each.args and isinstance(each.args[0], str):
            each.args = (each.args[0].strip().partition("\n")[0], *each.args[1:])


def unknown_outcome(reason: str, id: int) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"the connection broke before the answer ({reason}), so it may be done or not: "
        f"look at task {id}; scheduling again with id={id} is safe",
        id,
    )


def lacks_tables(driver_error: object) -> bool:
    """Return whether tables or columns are missing."""
    first = _first_of(driver_error)
    if isinstance(first, str) and _is_sqlite(driver_error):
        return any(words in first for words in _MISSING_SQLITE)
    return sqlstate_of(driver_error) in _MISSING_PG or first in _MISSING_MYSQL


def translate(
    error: exc.DBAPIError,
    unknown_id: int | None = None,
    tables_remedy: str = TABLES_REMEDY,
    shown_url: str = "",
) -> DelayTaskError:
    """Return the typed error for a driver's error. Its text contains no values, which may be
    secrets."""
    reason = reason_of(error)
    if unknown_id is not None:
        return unknown_outcome(reason, unknown_id)
    if is_disconnect(error):
        return StoreUnavailableError(f"the database cannot be reached: {reason}")
    if is_conflict(error):
        return StoreUnavailableError(
            f"the database stayed busy for {TRIES} tries: {reason}", is_locked=True
        )
    if is_unable(error):
        return StoreUnavailableError(f"the database cannot work now: {reason}", is_unable=True)
    if lacks_tables(error.orig):
        where = f"the database {shown_url}".rstrip()
        return StoreError(f"the tables of {where} are missing or old ({reason}); {tables_remedy}")
    return StoreError(f"the database refused: {reason}")
