"""Services and databases for the tests: running, embedded or reported as missing, and cleaned up
afterwards. The option `-ra` of pytest lists why tests were skipped.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import pytest
from sqlalchemy import delete

from delaytasks.db.engines import create_sqlite_file
from delaytasks.db.store import Store
from delaytasks.settings import Settings, load_settings
from tests import services as servers
from tests.proxy import WebServer
from tests.running import ROOT
from tests.services import RabbitServer, RedisServer, Services
from tests.world import World

#: The databases of tests that run on each database. `psycopg` is PostgreSQL with psycopg 3.
DATABASES = os.environ.get("DELAYTASKS_TEST_DATABASES", "postgresql psycopg mariadb sqlite").split()
#: The files whose tests also run with psycopg 3, which sends the same statements as psycopg2. They
#: hold what a driver does: COPY, lists, prepared statements, row counts, errors and instants.
DRIVER_FILES = ["async", "claims", "connections", "inserts", "outages", "settlements", "times"]
DRIVER_FILES += ["transactions"]
_IS_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests that are marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the slow tests, unless `--all`, a path or a `-m` of the command line selects tests.

    Processes of xdist receive the options of the first process.
    """
    is_selected = config.option.all or config.option.markexpr
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not is_selected:
        config.option.markexpr = "quick or not slow"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most tests with psycopg 3, unless psycopg 3 is the only database."""

    def is_kept(item: pytest.Item) -> bool:
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        is_psycopg = parameters.get("database_url") == "psycopg" != " ".join(DATABASES)
        return not is_psycopg or item.path.stem.removeprefix("test_") in DRIVER_FILES

    kept = [item for item in items if is_kept(item)]
    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = kept


def pytest_collection_finish() -> None:
    """Let the garbage collector skip modules and tests, which live until the end, and run less
    often: otherwise it takes a large part of the CPU time of the tests. A file or a connection that
    a test leaves open is reported when it is collected, often in a later test.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_setup() -> None:
    """Go on measuring coverage if the test before has ended it. Python removes a trace function in
    which an exception strikes, such as that of a time limit.
    """
    if "coverage" not in sys.modules or sys.gettrace() is not None:
        return
    measuring = sys.modules["coverage"].Coverage.current()
    if measuring is not None:
        measuring.stop()
        measuring.start()


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    found = Services()
    yield found
    found.close()


def _url(services: Services, name: str) -> str:
    with _needing(name):
        return services.url(name)
    raise AssertionError("unreachable")


@contextmanager
def _needing(name: str) -> Iterator[None]:
    """Give the test up if a service is missing."""
    try:
        yield
    except servers.MissingServiceError as error:
        reason = f"needs {name}, which is not available on this machine: {error}"
    else:
        return
    give_up(reason)


def give_up(reason: str) -> NoReturn:
    """Skip the test on a developer's machine, but fail in CI, where a missing service must not go
    unnoticed.
    """
    if _IS_CI:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def postgresql_url(services: Services) -> Iterator[str]:
    """A private database of this session."""
    yield from _own(_url(services, "postgresql"))


@pytest.fixture(scope="session")
def psycopg_url(services: Services) -> Iterator[str]:
    """A private database of this session on PostgreSQL, and its URL with psycopg 3."""
    pytest.importorskip("psycopg")
    for url in _own(_url(services, "postgresql"), "_psycopg"):
        yield url.replace("+psycopg2:", "+psycopg:")


@pytest.fixture(scope="session")
def mysql_url(services: Services) -> Iterator[str]:
    """A private MariaDB or MySQL database of this session."""
    yield from _own(_url(services, "mysql"))


def _own(url: str, part: str = "") -> Iterator[str]:
    mine, drop = servers.own_database(url, part)
    yield mine
    drop()


@pytest.fixture(scope="session")
def redis_url(services: Services) -> str:
    """The URL of a Redis that other tests may use too: prefix your keys."""
    return _url(services, "redis")


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Start private Redis servers with options of `redis-server`."""
    started: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        with _needing("redis-server"):
            started.append(RedisServer(tmp_path, *options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def own_rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A private RabbitMQ of a module, because it takes seconds to start."""
    with _needing("rabbitmq-server"):
        server = RabbitServer(tmp_path_factory.mktemp("rabbitmq"))
    yield server
    server.stop()


@pytest.fixture
def amqps(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Celery's configuration for a private RabbitMQ with TLS."""
    port = servers.free_port()
    with _needing("rabbitmq-server"):
        key, certificate = servers.self_signed(tmp_path)
        options = {"cacertfile": certificate, "certfile": certificate, "keyfile": key}
        lines = [f"ssl_options.{name} = {value}" for name, value in options.items()]
        lines += ["ssl_options.verify = verify_none"]
        server = RabbitServer(tmp_path, f"listeners.ssl.default = 127.0.0.1:{port}", *lines)
    ssl = {"ca_certs": str(certificate), "cert_reqs": 2, "server_hostname": "localhost"}
    yield {"broker_url": f"amqps://guest:guest@localhost:{port}//", "broker_use_ssl": ssl}
    server.stop()


@pytest.fixture
def own_postgresql() -> Iterator[servers.PostgresServer]:
    """A private PostgreSQL server."""
    # Other users cannot enter pytest's folder.
    with tempfile.TemporaryDirectory(prefix="dt_test_") as folder:
        with _needing("postgresql-server"):
            server = servers.PostgresServer(Path(folder))
        yield server
        server.stop()


@pytest.fixture
def logging_mariadb(tmp_path: Path) -> Iterator[servers.MariaDBServer]:
    """A private MariaDB that writes a binary log, as a replicated one does."""
    with _needing("mariadb-server"):
        server = servers.MariaDBServer(tmp_path, options=["--log-bin=binlog", "--server-id=1"])
    yield server
    server.stop()


@pytest.fixture
def galera() -> Iterator[tuple[servers.GaleraNode, servers.GaleraNode]]:
    """Two nodes of a private Galera cluster."""
    # Other users, such as the one of rsync, cannot enter pytest's folder.
    with tempfile.TemporaryDirectory(prefix="dt_test_") as folder:
        places = Path(folder), Path(folder, "first"), Path(folder, "second")
        for place in places:
            place.mkdir(exist_ok=True)
            place.chmod(0o755)
        with _needing("mariadb-server with galera-4 and rsync"), ExitStack() as nodes:
            first = servers.GaleraNode(places[1])
            nodes.callback(first.stop)
            second = servers.GaleraNode(places[2], first)
            nodes.callback(second.stop)
            yield first, second


@pytest.fixture(scope="session")
def rabbitmq_url(services: Services) -> str:
    """The URL of a RabbitMQ that other tests may use too: prefix your queues."""
    return _url(services, "rabbitmq")


def _marked(database: str) -> Any:
    """Return a parameter of `database_url`. MariaDB takes as long as the others together, and
    psycopg 3 sends the same statements as psycopg2."""
    is_slow = database in ("mariadb", "psycopg")
    return pytest.param(database, marks=pytest.mark.slow if is_slow else ())


@pytest.fixture(scope="session", params=[_marked(database) for database in DATABASES])
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An empty database of each kind, for this session."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'test.sqlite3'}"
    fixtures = {"postgresql": "postgresql_url", "psycopg": "psycopg_url", "mariadb": "mysql_url"}
    url: str = request.getfixturevalue(fixtures[request.param])
    return url


def settings_for(url: str | Sequence[str], **changes: Any) -> Settings:
    return load_settings({}, {}, database_url=url, **changes)


def open_store(url: str, **changes: Any) -> Store:
    """Return a store with new tables."""
    store = Store(url, settings_for(url, **changes))
    create_sqlite_file(store.database.url)
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
        store.schema.metadata.create_all(connection)
    return store


P = ParamSpec("P")
T = TypeVar("T", bound=Any)


@contextmanager
def closing_all(make: Callable[P, T]) -> Iterator[Callable[P, T]]:
    """Yield `make`. Afterwards, close what it has returned, the last value first."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(make(*args, **options)))


W = TypeVar("W", bound=World)


@contextmanager
def new_world(kind: type[W], url: str, **settings: Any) -> Iterator[W]:
    """Yield a world with tables of its own, which are dropped afterwards."""
    store = open_store(url, **settings)
    world = kind(store, **settings)
    try:
        yield world
    finally:
        world.close()
        store.schema.metadata.drop_all(store.database.tx)
        store.close()


def empty(store: Store) -> None:
    """Delete all rows. On small tables, DELETE is many times faster than TRUNCATE."""
    with store.database.begin() as connection:
        for table in store.schema.metadata.sorted_tables:
            connection.execute(delete(table))


@pytest.fixture(scope="session")
def session_store(database_url: str) -> Iterator[Store]:
    store = open_store(database_url, table_prefix="s_")
    yield store
    store.close()


@pytest.fixture
def store(session_store: Store) -> Store:
    """A store with empty tables, on each database."""
    empty(session_store)
    return session_store


@pytest.fixture
def make_world(store: Store) -> Iterator[Callable[..., World]]:
    """Make worlds with settings, on the empty tables of each database."""
    with closing_all(partial(World, store)) as make:
        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world on the empty tables of each database."""
    return make_world()


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Callable[..., str]:
    """Return URLs of private SQLite files."""

    def url(name: str = "test") -> str:
        return f"sqlite:///{tmp_path / name}.sqlite3"

    return url


@pytest.fixture
def task_suite() -> Path:
    """The tests of Django's task backends, which `./dev test-django` and `./dev test-oldest`
    download. Without a network, the test is skipped, in CI too."""
    folder = os.environ.get("DELAYTASKS_TEST_TASK_SUITE")
    if folder is None:
        pytest.skip("`./dev test-django` and `./dev test-oldest` run this test")
    if not (ROOT / folder).is_dir():
        pytest.skip(f"the tests of django-tasks could not be downloaded into {folder}")
    return ROOT / folder


@pytest.fixture
def web() -> Iterator[WebServer]:
    """A private web server with configurable answers."""
    server = WebServer()
    yield server
    server.close()
