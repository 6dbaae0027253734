"""The `DelayTasks` of a Django project, from settings.DELAYTASKS and settings.DATABASES.

Rows are written on Django's connections, in its transactions, and armed after their commits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from functools import cached_property, lru_cache, partial
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from celery import Celery, _state
from django.conf import settings
from django.db import (
    Error,
    InterfaceError,
    OperationalError,
    close_old_connections,
    connections,
    transaction,
)
from django.utils.asyncio import async_unsafe
from django.utils.module_loading import autodiscover_modules, import_string
from sqlalchemy import URL, Connection, DateTime, Engine, NullPool, exc, make_url, select
from sqlalchemy.dialects.sqlite import DATETIME
from sqlalchemy.engine import Dialect

from delaytasks.client import DelayTasks
from delaytasks.db.engines import (
    CONFLICT,
    DEMOTED,
    MISSING,
    is_unsure,
    reason_of,
    translate,
    unknown_outcome,
)
from delaytasks.db.sessions import ConnectionSource
from delaytasks.db.types import db_now
from delaytasks.model.errors import ConfigError, DelayTaskError, SessionUnusableError
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import Secret
from delaytasks.runtime import ProcessorContext, Runtime, runtime_of

# -- The instance of a project --------------------------------------------------------------------


#: What a user does if the tables are missing or old.
MIGRATE_REMEDY = "run: python manage.py migrate"


class DjangoDelays(DelayTasks):
    """Delayed tasks whose rows are written on a connection of Django's."""

    _tables_remedy = MIGRATE_REMEDY

    def __init__(self, celery_app: Any, alias: str = "default", **options: Any) -> None:
        if not isinstance(alias, str) or alias not in connections.settings:
            raise ConfigError(
                f"settings.DELAYTASKS['database'] = {alias!r} is not one alias of "
                f"settings.DATABASES ({', '.join(map(repr, connections.settings))}); several "
                "databases need a DelayTasks of your own"
            )
        self.alias = alias
        #: The name of the database that the runtime was made for.
        self._database: Any = None
        super().__init__(celery_app, **options)

    def import_processors(self) -> None:
        """Import `delays.py` of every installed app.

        Tasks of Django's Tasks framework are in `tasks.py`.
        """
        backends = (getattr(settings, "TASKS", None) or {}).values()
        has_tasks = any(
            str(each.get("BACKEND")).startswith("delaytasks.contrib.django.tasks_backend.")
            for each in backends
        )
        autodiscover_modules("delays", *(["tasks"] if has_tasks else []))

    @property
    def _runtime(self) -> Runtime:
        """Made anew when Django's test runner gives the database another name."""
        name = connections.settings[self.alias]["NAME"]
        if self._made is None or name != self._database:
            with self._lock:
                if self._made is not None and name != self._database:
                    self._renew_runtime()
                connection = connections[self.alias]
                url = database_url(connection.vendor, connection.settings_dict)
                self._arguments["database_url"] = Secret(url)
                self._database = name
        return super()._runtime

    def _ambient_transaction(self) -> DjangoTransaction:
        return DjangoTransaction(self.alias, is_robust=not self._is_in_test)

    def _processor_contexts(self) -> Sequence[ProcessorContext]:
        return [self._closes_connections]

    def _in_framework(self, call: Callable[[], Any]) -> Awaitable[Any]:
        """Run the call in the thread where Django's asynchronous ORM has its connection."""
        result: Awaitable[Any] = sync_to_async(call, thread_sensitive=True)()
        return result

    def _test_connections(self) -> ConnectionSource:
        return source_at(self.alias)

    @contextmanager
    def _closes_connections(self, task: DelayedTask) -> Iterator[None]:
        """Close the connections that Django's async calls have in a thread of asgiref.

        Celery's signals do not reach that thread.
        """
        try:
            yield
        finally:
            # A test has its transaction on the only connection.
            processor = None if self._is_in_test else self._registry.get(task.tag)
            if processor is not None and iscoroutinefunction(processor.function):
                from delaytasks.run.calls import result_of

                result_of(sync_to_async(close_old_connections)())

    def _database_now(self, insists: bool) -> datetime:
        """Read the time on Django's connection, unless this is a worker.

        A connection of our own would stay open, and Django's test runner could not drop its
        database then. A worker has connections of its own in any case, and threads in which
        Django's connections would never be closed.
        """
        if self._processes.is_worker:
            return super()._database_now(insists)
        try:
            now: datetime = (
                DjangoConnection(connections[self.alias]).execute(select(db_now())).scalar_one()
            )
        except (Error, exc.DBAPIError):
            with DjangoTransaction(self.alias).guard():  # translates the error
                raise
        return now


@lru_cache(maxsize=1)
def project_delays() -> DjangoDelays:
    """Return the instance of the project, made by the first call."""
    options = getattr(settings, "DELAYTASKS", {})
    if not isinstance(options, dict):
        raise ConfigError(
            f"settings.DELAYTASKS is a dict of settings, not {type(options).__name__}"
        )
    options = dict(options)
    if "database_url" in options:
        raise ConfigError(
            "settings.DELAYTASKS has 'database_url', but rows are written on a connection of "
            "Django's: name an alias of settings.DATABASES as 'database' instead"
        )
    path, alias = options.pop("celery_app", None), options.pop("database", "default")
    delays = DjangoDelays(_celery_app(path), alias, **options)
    try:
        runtime_of(delays)  # raises the errors of wrong settings
    except ConfigError as error:
        raise ConfigError(f"{error} (see settings.DELAYTASKS)") from None
    return delays


def _celery_app(path: str | None) -> Any:
    """Return the app at `path`, else the current app, else an app made from Django's settings."""
    if path is not None:
        found = import_string(path.replace(":", "."))
        if not isinstance(found, Celery):
            raise ConfigError(
                f"settings.DELAYTASKS['celery_app'] = {path!r} is a {type(found).__name__}, not a "
                "Celery app"
            )
        return found
    current = _state._tls.current_app or _state.default_app
    if current is not None:
        return current
    urls = getattr(settings, "ROOT_URLCONF", None)  # a project without views need not have it
    made = Celery(str(urls).partition(".")[0] if urls else "django")
    made.config_from_object("django.conf:settings", namespace="CELERY")
    made.autodiscover_tasks()
    return made


# -- Django's connections and transactions, as the storage uses them ------------------------------


class DjangoConnection:
    """A caller's connection of Django, as the storage uses it: statements run on SQLAlchemy's."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        #: The id of the last written row, for an error that says that its outcome is unknown.
        self.written_id: int | None = None

    @cached_property
    def _lent(self) -> Connection:
        return lent_by(self._connection)

    @property
    def dialect(self) -> Any:
        return dialect_of(self._connection)

    def begin_nested(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = transaction.atomic(using=self._connection.alias)
        return context

    def in_transaction(self) -> bool:
        return bool(self._connection.in_atomic_block)

    def execute(self, statement: Any, parameters: Any = None, /) -> Any:
        if parameters and "id" in parameters:
            self.written_id = parameters["id"]
        self._connection.validate_no_broken_transaction()
        try:
            return self._lent.execute(statement, parameters)
        except exc.DBAPIError:
            self._connection.errors_occurred = True  # Django then checks the connection
            raise

    def exec_driver_sql(self, sql: str) -> Any:
        """Execute SQL that has its values in it."""
        return self._lent.exec_driver_sql(sql)


def lent_by(connection: Any) -> Connection:
    """Return a SQLAlchemy connection on Django's, which ends no transaction of it."""
    connection.ensure_connection()
    engine = getattr(connection, "_delaytasks_engine", None)
    if engine is None:  # kept, since it has the compiled statements
        url = URL.create(connection.vendor, database=str(connection.settings_dict["NAME"] or ""))
        dialect = dialect_of(connection)
        pool = NullPool(lambda: _Lent(connection.connection), dialect=dialect)
        # Errors are shown without the values of rows, which may be secrets.
        engine = Engine(pool, dialect, url, hide_parameters=True)
        connection._delaytasks_engine = engine
    lent: Connection = engine.connect()
    if getattr(lent.dialect, "server_version_info", None) is None:
        lent.dialect.initialize(lent)
    # psycopg 3 does not count rows otherwise.
    return lent.execution_options(preserve_rowcount=True)


class _Lent:
    """Django's connection of the driver, without the methods that end a transaction."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        cursor = self._connection.cursor(*arguments, **options)
        if hasattr(cursor, "adapters"):  # psycopg 3, for which Django has registered its own
            from psycopg.types.datetime import TimestamptzLoader

            cursor.adapters.register_loader("timestamptz", TimestamptzLoader)
        return cursor

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def dialect_of(connection: Any) -> Any:
    """Return SQLAlchemy's dialect for the driver that Django uses."""
    return _dialect_of(connection.vendor, connection.Database)


@lru_cache
def _dialect_of(vendor: str, driver: Any) -> Any:
    name = f"{vendor}+{_DRIVER_NAMES.get(driver.__name__, driver.__name__)}"
    dialect: Any = make_url(f"{name}://").get_dialect()
    # Our tables have no hstore, and looking for it would need more of the connection.
    options = {"use_native_hstore": False} if vendor == "postgresql" else {}
    made = dialect(dbapi=driver, **options)
    if vendor == "sqlite":
        made.colspecs = {**made.colspecs, DateTime: _SQLiteInstant}
    return made


class _SQLiteInstant(DATETIME):
    """An instant that Django's connection may have read already."""

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        read: Any = super().result_processor(dialect, coltype)
        return lambda value: value if isinstance(value, datetime) else read(value)


#: SQLAlchemy's names of drivers. Where PyMySQL takes the place of mysqlclient, both work alike.
_DRIVER_NAMES = {"MySQLdb": "mysqldb", "sqlite3": "pysqlite", "sqlite3.dbapi2": "pysqlite"}


# -- Makes the SQLAlchemy URL of a Django database, by which workers reach its tables -------------


_DRIVERS = {"postgresql": "postgresql+psycopg2", "mysql": "mysql+pymysql", "sqlite": "sqlite"}
#: Options of Django and of psycopg 3 that psycopg2 does not know.
_NOT_LIBPQ = frozenset(
    "context cursor_factory isolation_level pool prepare_threshold row_factory "
    "server_side_binding".split()
)
#: Options that both MySQL drivers accept in a URL. The storage sets character set and isolation.
_MYSQL_OPTIONS = frozenset(
    "connect_timeout init_command read_default_file read_default_group read_timeout sql_mode "
    "unix_socket write_timeout".split()
)


def database_url(vendor: str, database: Mapping[str, Any]) -> str:
    """Return the URL of an entry of settings.DATABASES (`settings_dict` of a connection)."""
    name, options = str(database.get("NAME") or ""), database.get("OPTIONS") or {}
    if vendor not in _DRIVERS:
        raise ConfigError(
            f"settings.DATABASES: delaytasks cannot use a {vendor!r} database (only "
            f"{', '.join(_DRIVERS)}); name another alias in settings.DELAYTASKS['database']"
        )
    # Django's test databases in memory are named like this; any other name is a file.
    if vendor == "sqlite" and name.startswith("file:"):
        return f"sqlite:///{name}{'&' if '?' in name else '?'}uri=true"
    host, port = str(database.get("HOST") or ""), str(database.get("PORT") or "")
    query = {}
    if vendor == "postgresql":
        query = {each: str(value) for each, value in options.items() if each not in _NOT_LIBPQ}
        if host.startswith(("/", "@")) or "," in host + port:  # a socket, or several hosts
            query |= {"host": host} | ({"port": port} if port else {})
            host = port = ""
    elif vendor == "mysql":
        query = {each: str(value) for each, value in options.items() if each in _MYSQL_OPTIONS}
        query |= {f"ssl_{each}": str(path) for each, path in (options.get("ssl") or {}).items()}
        mode = str(options.get("ssl_mode", "")).upper()
        if mode in ("REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY"):
            query["ssl_check_hostname"] = str(mode == "VERIFY_IDENTITY").lower()
        if host.startswith("/"):
            query["unix_socket"], host = host, ""
        host = host or ("" if "read_default_file" in query else "localhost")
    url = URL.create(
        _DRIVERS[vendor],
        username=str(database.get("USER") or "") or None,
        password=str(database.get("PASSWORD") or "") or None,
        host=host or None,
        port=int(port) if port else None,
        database=name or None,
        query=query,
    )
    return url.render_as_string(hide_password=False)


# -- Runs all statements of delaytasks on a connection of Django's, for tests ---------------------

# Django's tests roll a transaction back, so its connection is the only one that sees their rows.


def source_at(alias: str) -> ConnectionSource:
    """Return the connections of a database in `settings.DATABASES`."""
    return ConnectionSource(
        partial(_connect, alias),
        partial(_around_processor, alias),
        async_to_sync(_awaited),
        lambda call: sync_to_async(call, thread_sensitive=True)(),
    )


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


@contextmanager
def _connect(alias: str) -> Iterator[Connection]:
    """Open a SQLAlchemy connection on Django's, in an atomic block that commits or rolls back."""
    with transaction.atomic(using=alias), lent_by(connections[alias]) as connection:
        yield connection


@contextmanager
def _around_processor(alias: str, task: DelayedTask) -> Iterator[None]:
    """Leave the test's transaction usable if a statement of the processor fails.

    A worker has no transaction around a processor, so only that statement would be undone.
    """
    connection = connections[alias]
    if not connection.in_atomic_block:
        yield
        return
    savepoint = transaction.savepoint(using=alias)
    try:
        yield
    except BaseException:
        if connection.needs_rollback or not _is_usable(connection):
            connection.needs_rollback = False
            transaction.savepoint_rollback(savepoint, using=alias)
        raise
    transaction.savepoint_commit(savepoint, using=alias)


def _is_usable(connection: Any) -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error:
        return False
    return True


# -- The current transaction of a Django connection, in which rows are written --------------------


_refuse_coroutines = async_unsafe(
    "Django's connections are not for the event loop of a coroutine: await the asynchronous twin, "
    "such as aschedule_delay"
)(lambda: None)


class DjangoTransaction:
    """Inside `atomic`, the caller's transaction; outside, one transaction for each call."""

    reports_changes = False

    def __init__(self, alias: str, is_robust: bool = True) -> None:
        """A test sets `is_robust=False`, so that errors after the commit reach it."""
        _refuse_coroutines()
        self._is_robust = is_robust
        self._django_connection = connections[alias]
        self.connection = DjangoConnection(self._django_connection)

    def after_commit(
        self, tasks: Sequence[DelayedTask], action: Callable[[Sequence[DelayedTask]], None]
    ) -> None:
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
            known = self._known(error)
            remedy = f"; {MIGRATE_REMEDY}" if MISSING.caused(known.orig) else ""
            raise SessionUnusableError(
                f"the transaction on database {connection.alias!r} cannot be used: "
                f"{reason_of(known)}; leave the atomic block by an exception, nothing was sent"
                f"{remedy}"
            ) from error

    def _typed(self, error: Exception, unknown_id: int | None) -> DelayTaskError:
        connection, known = self._django_connection, self._known(error)
        # Django checks its connections only between requests, and a script has no requests.
        connection.close_if_unusable_or_obsolete()
        if DEMOTED.caused(known.orig):
            connection.close()  # a new connection may reach the new primary
        elif is_unsure(known) and unknown_id is not None:
            return unknown_outcome(reason_of(known), unknown_id)
        return translate(known, None, MIGRATE_REMEDY, repr(connection.alias))

    def _known(self, error: Any) -> exc.DBAPIError:
        """Return SQLAlchemy's error for one of Django, which come from connecting and commits."""
        if isinstance(error, exc.DBAPIError):
            return error
        driver_error: Any = error.__cause__ or error
        is_lost = isinstance(error, (OperationalError, InterfaceError))
        known: Any = exc.DBAPIError.instance(
            None,
            None,
            driver_error,
            Exception,
            connection_invalidated=is_lost and not CONFLICT.caused(driver_error),
            dialect=self.connection.dialect,
        )
        return known  # type: ignore[no-any-return]
