"""One database with all objects that read and write its tables."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import delete, false, select

from delaytasks.db.bulk_moves import Bulk
from delaytasks.db.claims import Claims
from delaytasks.db.database import Database
from delaytasks.db.migrations import check_charset
from delaytasks.db.policy_rows import PausedRows, PolicyTable
from delaytasks.db.schema import Schema
from delaytasks.db.statements import Notices
from delaytasks.db.sweep_queries import Leases, SweepQueries, WorkerTable
from delaytasks.db.task_rows import Tasks
from delaytasks.model.body import Cipher
from delaytasks.model.errors import ConfigError, StoreError, StoreUnavailableError
from delaytasks.model.policies import PolicyCache
from delaytasks.model.text import TABLES_REMEDY
from delaytasks.settings import Settings


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
        self.schema = Schema(settings.name_prefix, settings.table_schema, cipher)
        self.tasks = Tasks(self.database, self.schema)
        self.bulk = Bulk(self.database, self.schema)
        self.sweeps = SweepQueries(
            self.database, self.schema, settings.timer_kind, settings.namespace
        )
        self.leases = Leases(self.database, self.schema, settings.lease_s)
        self.workers = WorkerTable(self.database, self.schema)
        self.policies = PolicyTable(self.database, self.schema)
        self.paused_rows = PausedRows(self.database, self.schema)
        self.notices = Notices(self.database, self.schema)
        self._lease_s = settings.lease_s

    def claims(self, worker: str, ip: int | None, policies: PolicyCache | None = None) -> Claims:
        return Claims(self.database, self.schema, worker, ip, self._lease_s, policies)

    def check(self) -> None:
        """Raise `ConfigError` if a table that claims read is missing, too old or too narrow, or
        cannot be read."""
        where, schema = self.database.shown_url, self.schema
        for table in (schema.tasks, schema.policies, schema.cancel_requests):
            try:
                self.database.rows(select(table).where(false()))
            except StoreUnavailableError:
                raise
            except StoreError as error:
                raise ConfigError(
                    f"{table.fullname} cannot be read, in {where}: {error}"
                ) from error
        check_charset(self.database, schema)

    def clear(self) -> None:
        """Delete all rows, for tests."""
        with self.database.begin() as connection:
            for table in reversed(self.schema.metadata.sorted_tables):
                connection.execute(delete(table))

    def close(self) -> None:
        self.database.dispose()
