"""One database with its tables, put together."""

from __future__ import annotations

from delaytasks.core.settings import Settings
from delaytasks.store.claims import Claims
from delaytasks.store.database import Database
from delaytasks.store.leases import Leases
from delaytasks.store.schema import build_schema
from delaytasks.store.sweeps import Sweeps
from delaytasks.store.tasks import Tasks
from delaytasks.store.workers import Workers


class Store:
    def __init__(self, url: str, settings: Settings) -> None:
        self.database = Database(url, settings.pool_size)
        self.schema = build_schema(settings.table_prefix, settings.table_schema)
        self.tasks = Tasks(self.database, self.schema)
        self.sweeps = Sweeps(self.database, self.schema)
        self.leases = Leases(self.database, self.schema, settings.lease_s)
        self.workers = Workers(self.database, self.schema)
        self._lease_s = settings.lease_s

    def claims(self, worker: str, ip: int | None) -> Claims:
        return Claims(self.database, self.schema, worker, ip, self._lease_s)

    def close(self) -> None:
        self.database.dispose()
