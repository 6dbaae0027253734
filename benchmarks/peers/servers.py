"""The servers of a run: a private PostgreSQL database, a private Redis, and a running RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url

from benchmarks import brokers, machine, redis_server
from benchmarks.ours import app
from benchmarks.settings import broker_url, database_url
from benchmarks.waiting import BenchError

POSTGRESQL, REDIS, RABBITMQ = "PostgreSQL", "Redis", "RabbitMQ"
_RABBITMQ = "amqp://guest:guest@127.0.0.1:5672//"


class Servers:
    """Servers that are emptied before each measurement."""

    def __init__(self, redis: redis_server.PrivateRedisServer) -> None:
        url = make_url(database_url())
        if url.get_backend_name() != "postgresql":
            raise BenchError("--peers needs PostgreSQL: set DELAYTASKS_BENCH_DATABASE_URL")
        self._admin = create_engine(
            url.set(drivername="postgresql+psycopg2"), isolation_level="AUTOCOMMIT"
        )
        self._own: URL = url.set(
            drivername="postgresql", database=f"bench_peers_{url.database}"[:63]
        )
        self._uses_rabbitmq = False
        self.redis_url = redis.url
        self.rabbitmq_url = broker_url() if broker_url().startswith("amqp") else _RABBITMQ
        self._redis: Any = Redis.from_url(redis.url)
        self._redis_pid = int(self._redis.info("server")["process_id"])
        #: The CPU time of each backend when it was last seen.
        self._backends: dict[int, float] = {}

    @property
    def database_url(self) -> str:
        return self._own.render_as_string(hide_password=False)

    def environment(self, broker: str) -> dict[str, str]:
        """Return the environment of a side's processes; `broker` is the one for Celery."""
        return {
            "BENCH_DATABASE_URL": self.database_url,
            "BENCH_REDIS_URL": self.redis_url,
            "BENCH_BROKER_URL": self.rabbitmq_url if broker == RABBITMQ else self.redis_url,
        }

    def clear(self) -> None:
        self.drop()
        with self._admin.connect() as connection:
            connection.execute(text(f'CREATE DATABASE "{self._own.database}"'))
        self._redis.flushall()

    def drop(self) -> None:
        with self._admin.connect() as connection:
            connection.execute(text(f'DROP DATABASE IF EXISTS "{self._own.database}" WITH (FORCE)'))

    def missing(self, names: tuple[str, ...]) -> str:
        """Return why these servers are unavailable, or an empty string."""
        if RABBITMQ in names and not self._uses_rabbitmq:
            with app.connection_for_write(self.rabbitmq_url) as connection:
                try:
                    connection.ensure_connection(max_retries=1, interval_start=0)
                except OperationalError as error:
                    return f"{connection.as_uri()} does not answer ({error})"
            self._uses_rabbitmq = True
        return ""

    def close(self) -> None:
        self.drop()
        if self._uses_rabbitmq:
            with app.connection_for_write(self.rabbitmq_url) as connection:
                brokers.delete_queues(connection)
        self._admin.dispose()

    def cpu_s(self, names: tuple[str, ...]) -> float | None:
        """Return the CPU time of these servers, or None if they are not local.

        On PostgreSQL, it is the time of the connections to this run's database and of the server's
        background processes. On RabbitMQ, it includes the work for other clients.
        """
        found = [self._cpu_s(name) for name in names]
        return None if None in found else sum(one for one in found if one is not None)

    def held_bytes(self, name: str) -> int | None:
        """Return the memory of the tasks; on PostgreSQL their disk space."""
        if name == POSTGRESQL:
            with self._admin.connect() as connection:
                return int(
                    connection.scalar(
                        text("SELECT pg_database_size(:name)"), {"name": self._own.database}
                    )
                    or 0
                )
        if name == REDIS:
            return int(self._redis.info("memory")["used_memory"])
        return machine.rss_bytes_of("beam.smp")

    def versions(self) -> dict[str, str]:
        with self._admin.connect() as connection:
            postgresql = str(connection.scalar(text("SHOW server_version")))
        return {POSTGRESQL: postgresql, REDIS: str(self._redis.info("server")["redis_version"])}

    def _cpu_s(self, name: str) -> float | None:
        if name == POSTGRESQL:
            return self._backends_cpu_s()
        found = machine.usage(self._redis_pid) if name == REDIS else machine.usage_of("beam.smp")
        return None if found is None else found.cpu_s

    def _backends_cpu_s(self) -> float | None:
        query = text("SELECT pid FROM pg_stat_activity WHERE datname = :name OR datname IS NULL")
        with self._admin.connect() as connection:
            pids = connection.scalars(query, {"name": self._own.database}).all()
        local = [pid for pid in pids if machine.program_of(pid) == "postgres"]
        for pid in local:
            if (found := machine.usage(pid)) is not None:
                self._backends[pid] = found.cpu_s
        return sum(self._backends.values()) if local else None


@contextmanager
def started(folder: Path) -> Iterator[Servers]:
    with redis_server.private(folder) as redis:
        servers = Servers(redis)
        try:
            yield servers
        finally:
            servers.close()
