"""One database with its tables: the storage objects of a process."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, delete, exc, inspect

from delaytasks.core.body import Cipher
from delaytasks.core.errors import ConfigError, StoreError, StoreUnavailableError
from delaytasks.core.settings import Settings
from delaytasks.core.text import TABLES_REMEDY
from delaytasks.storage import sqlite_file
from delaytasks.storage.bulk import Bulk
from delaytasks.storage.celery_rows import CeleryRows
from delaytasks.storage.claims import Claims, HoldExcess
from delaytasks.storage.database import Database
from delaytasks.storage.deferred_rows import DeferredRows
from delaytasks.storage.due_schedules import DueSchedules
from delaytasks.storage.inspection import Inspection
from delaytasks.storage.leases import Leases
from delaytasks.storage.migrations import check_charset
from delaytasks.storage.notices import Notices
from delaytasks.storage.paused_rows import PausedRows
from delaytasks.storage.policies import PolicyTable
from delaytasks.storage.schema import build_schema
from delaytasks.storage.sweep_queries import SweepQueries
from delaytasks.storage.tasks import Tasks
from delaytasks.storage.touches import Touches
from delaytasks.storage.waitlist_names import WaitlistNames
from delaytasks.storage.worker_table import WorkerTable


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
        self.schema = build_schema(settings.table_prefix, settings.table_schema, cipher)
        self.tasks = Tasks(self.database, self.schema)
        self.bulk = Bulk(self.database, self.schema)
        self.celery_rows = CeleryRows(self.database, self.schema)
        self.touches = Touches(self.database, self.schema)
        self.sweeps = SweepQueries(self.database, self.schema, settings.timer)
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
        self,
        worker: str,
        ip: int | None,
        limits: Callable[[], HoldExcess | None] = lambda: None,
    ) -> Claims:
        return Claims(self.database, self.schema, worker, ip, self._lease_s, limits)

    def check(self) -> None:
        """Raise `ConfigError` if tables are missing, too old or too narrow, or the policies cannot
        be read."""
        t, where, remedy = self.schema.tasks, self.database.shown_url, self.database.tables_remedy
        if sqlite_file.is_missing(self.database.url):
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
