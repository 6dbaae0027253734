"""The connections of a process: their round trips, their prepared statements, and the kept one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from celery import Celery
from sqlalchemy import Connection

from delaytasks import DelayedTask, DelayTasks
from delaytasks.broker import arming
from delaytasks.model import policies
from delaytasks.model.task import Entry
from delaytasks.runtime import runtime_of
from tests.conftest import open_store
from tests.proxy import proxy_to
from tests.running import delete_keys
from tests.world.plans import PlannedWorld
from tests.world.recording import runner_of

T = TypeVar("T")
#: The name of the tables and of the broker's queues.
NAME = "trips"


class RoundTrips(NamedTuple):
    database: int
    broker: int


class TripCounter:
    """A `DelayTasks` that reaches its servers through counting proxies, and arms when told."""

    def __init__(self, servers: str, database_url: str, broker_url: str) -> None:
        self.servers = servers
        self._database, self._broker = proxy_to(database_url), proxy_to(broker_url)
        self.url = self._database.url(database_url)
        self.app = Celery(NAME, broker=self._broker.url(broker_url), set_as_current=False)
        # A slow machine does not settle a part of a chunk at the end of its time budget.
        self.delays = DelayTasks(
            self.app, self.url, table_prefix=f"{NAME}_", namespace=NAME, _chunk_time_budget_s=10
        )
        self._store = open_store(self.url, table_prefix=f"{NAME}_")
        self._last = RoundTrips(0, 0)
        self._patches = ExitStack()
        # Once a second, a process without a worker also reads the policies.
        late = [(policies, "POLICY_REFRESH_S"), (arming, "ARM_DELAY_S")]
        for module, name in [*late, (arming, "ARM_DELAY_PART")]:
            self._patches.enter_context(mock.patch.object(module, name, 3600))

    def since_last(self) -> RoundTrips:
        """Return the round trips since the last call of this method."""
        last, now = self._last, RoundTrips(self._database.round_trips, self._broker.round_trips)
        self._last = now
        return RoundTrips(now.database - last.database, now.broker - last.broker)

    def of(self, work: Callable[[], object]) -> RoundTrips:
        self.since_last()
        work()
        return self.since_last()

    def flush(self) -> None:
        """Arm what was scheduled."""
        assert runtime_of(self.delays).flush()

    def run(self, tasks: Sequence[DelayedTask]) -> None:
        """Run a chunk."""
        runner_of(self.delays).run([Entry.of(task) for task in tasks])

    def close(self) -> None:
        self._patches.close()
        self._store.schema.metadata.drop_all(self._store.database.tx)
        self._store.close()
        publisher = runtime_of(self.delays).publisher
        with self.app.connection_for_write() as connection:
            queue = publisher.queue("default")(connection)
            queue.delete()
            queue.exchange.delete()
            delete_keys(connection, NAME)
        self.delays.close()
        self.app.close()
        self._database.close()
        self._broker.close()


class ConnectedWorld(PlannedWorld):
    """A world on PostgreSQL, and the connection that its process keeps for most statements."""

    def ask(self, sql: str, **options: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query on the kept connection."""
        own = self.store.database
        return own.repeat(lambda c: [*map(tuple, c.exec_driver_sql(sql))], own.connect, **options)

    def tell(self, statement: str) -> None:
        """Execute a statement on the kept connection."""
        self.store.database.autocommitted(lambda c: c.exec_driver_sql(statement))

    def alter(self, change: str) -> None:
        """Alter the table of tasks."""
        self.tell(f"ALTER TABLE {self.table().name} {change}")

    def forget(self) -> None:
        """Let the process forget what it has prepared on the kept connection."""
        self.store.database.autocommitted(lambda c: c.info.clear())

    def session(self) -> int:
        """Return the server's process of the kept connection."""
        return self.store.database.autocommitted(_session_of)

    def has_session(self, session: int) -> bool:
        with self.begin() as connection:
            query = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {session}"
            return bool(connection.exec_driver_sql(query).scalar_one())

    def end_session(self, session: int) -> None:
        """Let the server end the session of a connection."""
        with self.begin() as other:
            other.exec_driver_sql(f"SELECT pg_terminate_backend({session}, 5000)")

    def while_in_use(self, work: Callable[[], T]) -> T:
        """Call `work` while a statement is executed on the kept connection."""
        return self.store.database.autocommitted(lambda _: work())


def _session_of(connection: Connection) -> int:
    found: int = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
    return found
