"""The current transaction of a Django connection, in which rows are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from django.db import (
    DataError,
    Error,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connections,
    transaction,
)
from sqlalchemy import exc

from delaytasks.contrib.django.connection import DjangoConnection
from delaytasks.core.errors import (
    OutcomeUnknownError,
    SessionUnusableError,
    StoreError,
    StoreUnavailableError,
)
from delaytasks.core.task import DelayTask
from delaytasks.storage.driver_errors import is_demoted, lacks_tables

Action = Callable[[Sequence[DelayTask]], None]
#: What a user does if the tables are missing or old.
MIGRATE_REMEDY = "run: python manage.py migrate"


class DjangoTransaction:
    """Inside `atomic`, the caller's transaction; outside, one transaction for each call."""

    def __init__(self, alias: str, is_robust: bool = True) -> None:
        """A test sets `is_robust=False`, so that errors after the commit reach it."""
        self._is_robust = is_robust
        self._django_connection = connections[alias]
        self.connection = DjangoConnection(self._django_connection)

    def after_commit(self, tasks: Sequence[DelayTask], action: Action) -> None:
        connection = self._django_connection
        if connection.in_atomic_block or self.stands_alone:

            def act() -> None:  # Django names the function in its log, so it is no partial
                action(tasks)

            transaction.on_commit(act, using=connection.alias, robust=self._is_robust)
        # Otherwise the caller commits without a hook of Django: the sweep finds the row.

    @property
    def stands_alone(self) -> bool:
        connection = self._django_connection
        if connection.in_atomic_block:
            return False
        # `get_autocommit` would connect, and fail while the database is away.
        if connection.connection is None:
            return bool(connection.settings_dict["AUTOCOMMIT"])
        return bool(connection.autocommit)

    @contextmanager
    def guard(self, unknown_id: int | None = None) -> Iterator[DjangoConnection]:
        connection, is_written, is_alone = self._django_connection, False, self.stands_alone
        try:
            with transaction.atomic(using=connection.alias) if is_alone else nullcontext():
                yield self.connection
                is_written = True
        except SessionUnusableError as error:
            # An inner guard mistook the transaction of this guard for the caller's.
            if is_alone and isinstance(error.__cause__, (Error, exc.DBAPIError)):
                raise self._typed(error.__cause__, None) from error.__cause__
            raise
        except (Error, exc.DBAPIError) as error:
            if is_alone:
                raise self._typed(
                    error, (self.connection.written_id or unknown_id) if is_written else None
                ) from error
            if connection.in_atomic_block:
                # PostgreSQL would now answer COMMIT with a ROLLBACK and no error.
                transaction.set_rollback(True, using=connection.alias)
            raise SessionUnusableError(
                f"the transaction on database {connection.alias!r} cannot be used: "
                f"{_reason(error)}; leave the atomic block by an exception, nothing was sent"
            ) from error

    def _typed(self, error: Exception, unknown_id: int | None) -> StoreError:
        alias, reason = self._django_connection.alias, _reason(error)
        # Django checks its connections only between requests, and a script has no requests.
        self._django_connection.close_if_unusable_or_obsolete()
        is_read_only = is_demoted(_driver_error(error))
        if is_read_only:
            self._django_connection.close()  # a new connection may reach the new primary
        if not is_read_only and not isinstance(error, (OperationalError, InterfaceError)):
            return StoreError(f"database {alias!r} refused: {reason}")
        if unknown_id is not None and not is_read_only:
            return OutcomeUnknownError(
                f"the connection to database {alias!r} broke before the answer came ({reason}); "
                f"scheduling again with id={unknown_id} is safe",
                unknown_id,
            )
        return StoreUnavailableError(f"database {alias!r} cannot be used: {reason}")


#: The texts of PyMySQL's error for a closed connection.
_SAYS_NOTHING = ("", "(0, '')")


def _reason(error: Any) -> str:
    """Return the first line of the error, without values.

    Further lines may show values of the row, which may be secrets. If a value caused the error,
    even the first line may quote it.
    """
    if isinstance(error, (IntegrityError, DataError)):
        return f"a value cannot be stored ({type(error).__name__})"
    text = (str(getattr(error, "orig", None) or error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__} {text}".rstrip() if text in _SAYS_NOTHING else text
    return f"{text} ({MIGRATE_REMEDY})" if lacks_tables(_driver_error(error)) else text


def _driver_error(error: Any) -> object:
    """Return the error of the driver, which SQLAlchemy and Django keep in different places."""
    return getattr(error, "orig", None) or error.__cause__ or error
