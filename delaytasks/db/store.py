"""One database with all objects that read and write its tables, and its notifications."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

from sqlalchemy import Connection, bindparam, delete, exc, func, inspect, select

from delaytasks.db.bulk_moves import Bulk
from delaytasks.db.claims import Claims, HoldExcess
from delaytasks.db.database import Database
from delaytasks.db.engines import lacks_sqlite_file, make_engine, own_driver
from delaytasks.db.leases import Leases
from delaytasks.db.migrations import check_charset
from delaytasks.db.policy_rows import PausedRows, PolicyTable, WaitlistNames
from delaytasks.db.schema import Schema, build_schema
from delaytasks.db.settlements import DeferredRows
from delaytasks.db.sweep_queries import DueSchedules, SweepQueries
from delaytasks.db.task_rows import CeleryRows, Inspection, Tasks, Touches
from delaytasks.db.worker_table import WorkerTable
from delaytasks.model.body import Cipher
from delaytasks.model.errors import ConfigError, StoreError, StoreUnavailableError
from delaytasks.model.task import CallerConnection
from delaytasks.model.text import TABLES_REMEDY
from delaytasks.settings import Settings

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
        self._tell = select(func.pg_notify(self.channel, bindparam("payload")))

    @property
    def is_possible(self) -> bool:
        return self._db.can.notify

    def send(self, payloads: Iterable[str], on: CallerConnection | None = None) -> None:
        """Send the payloads at the commit of `on`, or immediately without `on`."""

        def work(connection: Any) -> None:
            for payload in payloads:
                connection.execute(self._tell, {"payload": payload})

        if self.is_possible:
            self._db.autocommitted(work, on)

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


class Store:
    def __init__(
        self,
        url: str,
        settings: Settings,
        cipher: Cipher | None = None,
        make_database: Callable[[str, int, str], Database] = Database,
        tables_remedy: str = TABLES_REMEDY,
    ) -> None:
        self.database = make_database(url, settings.pool_size, tables_remedy)
        self.schema = build_schema(settings.name_prefix, settings.table_schema, cipher)
        self.tasks = Tasks(self.database, self.schema)
        self.bulk = Bulk(self.database, self.schema)
        self.celery_rows = CeleryRows(self.database, self.schema)
        self.touches = Touches(self.database, self.schema)
        self.sweeps = SweepQueries(self.database, self.schema, settings.timer_kind)
        self.leases = Leases(self.database, self.schema, settings.lease_s)
        self.inspection = Inspection(self.database, self.schema)
        self.workers = WorkerTable(self.database, self.schema)
        self.deferred_rows = DeferredRows(self.database, self.schema)
        self.policies = PolicyTable(self.database, self.schema)
        self.paused_rows = PausedRows(self.database, self.schema)
        self.waitlist_names = WaitlistNames(self.database, self.schema)
        self.due_schedules = DueSchedules(self.database, self.schema)
        self.notices = Notices(self.database, self.schema)
        self._lease_s = settings.lease_s

    def claims(
        self, worker: str, ip: int | None, limits: Callable[[], HoldExcess | None] = lambda: None
    ) -> Claims:
        return Claims(self.database, self.schema, worker, ip, self._lease_s, limits)

    def check(self) -> None:
        """Raise `ConfigError` if tables are missing, too old or too narrow, or the policies cannot
        be read."""
        t, where, remedy = self.schema.tasks, self.database.shown_url, self.database.tables_remedy
        if lacks_sqlite_file(self.database.url):
            raise ConfigError(f"there is no database {where}; {remedy}")
        found = self.database.autocommitted(lambda c: _column_names(c, t.name, t.schema))
        missing = [column.name for column in t.columns if column.name not in found]
        if missing:
            what = f"has no column {', '.join(missing)}" if found else "does not exist"
            raise ConfigError(f"table {t.fullname} {what} in {where}; {remedy}")
        check_charset(self.database, self.schema)
        try:
            self.policies.check()  # needed by each claim
        except StoreUnavailableError:
            raise
        except StoreError as error:
            raise ConfigError(f"the policies cannot be read, in {where}: {error}") from error

    def clear(self) -> None:
        """Delete all rows, for tests."""
        with self.database.begin() as connection:
            for table in reversed(self.schema.metadata.sorted_tables):
                connection.execute(delete(table))

    def close(self) -> None:
        self.database.dispose()


def _column_names(connection: Connection, table: str, schema: str | None) -> set[str]:
    try:
        return {column["name"] for column in inspect(connection).get_columns(table, schema)}
    except exc.NoSuchTableError:
        return set()
