"""The store classifies a driver's errors, and reads the URLs of its databases."""

from __future__ import annotations

import operator
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import URL, Column, MetaData, Table, event, exc, make_url, select

import delaytasks
from delaytasks import (
    ConfigError,
    DelayedTask,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
)
from delaytasks.core.text import TABLES_REMEDY
from delaytasks.storage import engines
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import lacks_tables, translate
from delaytasks.storage.engines import _CopyFile, addresses_of, sqlite_path
from delaytasks.storage.inserts import _COPY_CHARACTERS, _COPY_ROWS, _copy_parts
from delaytasks.storage.migrations import comparison, ddl, exclusively
from delaytasks.storage.searching import estimate_rows
from delaytasks.storage.store import Store
from delaytasks.storage.types import capabilities_of
from tests.conftest import open_store, settings_for
from tests.world import Settlement
from tests.world.recording import counted

# -- the store classifies a driver's errors and retries the statement where that is safe ----------


SECRET = "s3cr3t-canary"


class DriverError(Exception):
    """Stand for an exception of a database driver."""


def error(
    *args: Any, state: str | None = None, kind: type[exc.DBAPIError] = exc.OperationalError
) -> exc.DBAPIError:
    made = type("DriverError", (DriverError,), {"pgcode": state})(*args)
    return kind("UPDATE", None, made)


def sqlite_error(text: str) -> exc.DBAPIError:
    made = type("OperationalError", (Exception,), {"__module__": "sqlite3"})(text)
    return exc.OperationalError("UPDATE", None, made)


def raising(*failures: Exception) -> Callable[[], Any]:
    """Return a function that raises these errors in order, and then repeats the last one."""
    left = list(failures)

    def work() -> Any:
        raise left.pop(0) if len(left) > 1 else left[0]

    return work


def run(*failures: Exception, id: int | None = None) -> object:
    """Run work that raises these errors. `id` is that of the task that it changes."""
    return Database("sqlite://").run(raising(*failures), id)


# -- servers that cannot work ---------------------------------------------------------------------

STATES = "53100 53200 57014 57P01 57P02 58030 25006".split()
CODES = [1021, 1040, 1053, 1114, 1203, 1226, 1317, 1047, 1180, 1290, 1792, 1836, 1874, 3100]
SQLITE = ["database or disk is full", "disk I/O error", "attempt to write a readonly database"]
UNABLE = {state: error("no", state=state) for state in STATES}
UNABLE |= {str(code): error(code, "no") for code in CODES}
UNABLE |= {text: sqlite_error(text) for text in SQLITE}


@pytest.mark.slow
@pytest.mark.parametrize("failure", UNABLE.values(), ids=UNABLE)
def test_a_server_that_answers_but_cannot_work_is_unavailable(failure: exc.DBAPIError) -> None:
    assert isinstance(translate(failure), StoreUnavailableError)
    with pytest.raises(StoreUnavailableError, match="cannot work now"):
        run(failure)


def test_an_error_in_a_statement_is_not_an_outage() -> None:
    syntax = [error("syntax", state="42601"), error(1064, "syntax"), sqlite_error("near x: syntax")]
    assert {type(translate(failure)) for failure in syntax} == {delaytasks.StoreError}


def test_a_full_disk_leaves_no_partial_change_and_counts_as_an_outage(tmp_path: Path) -> None:
    pages = [100_000]
    store = open_store(f"sqlite:///{tmp_path / 'tight.sqlite3'}")
    for engine in (store.database.auto, store.database.tx):
        event.listen(
            engine, "checkout", lambda link, *_: link.execute(f"PRAGMA max_page_count = {pages[0]}")
        )
    now = store.tasks.now()
    body = '"' + "x" * 400_000 + '"'
    task = DelayedTask(50, "mail", body, now, create_time=now)
    tasks = [replace(task, id=id) for id in range(1, 11)]
    keyed = replace(task, key="k")
    store.tasks.insert(tasks[0])
    claims = store.claims("w", None)
    [claimed] = claims.claim_due("default", [0], 1)
    pages[0] = 1  # SQLite does not reduce the limit below the current number of pages.
    failed = [Settlement(claimed, "fail", error=body)]
    for work in (
        lambda: store.tasks.insert_many(tasks[1:]),
        lambda: store.tasks.insert_keyed(keyed, "reject"),
        lambda: claims.settle(failed),
    ):
        with pytest.raises(StoreUnavailableError, match="full"):
            work()
    assert sum(counted(store).values()) == 1
    assert store.tasks.id_of_key("mail", "k") is None
    pages[0] = 100_000
    assert claims.settle(failed) == {1}
    assert store.tasks.insert_many(tasks[1:])
    store.close()


def test_a_deadlock_that_removed_the_savepoint_is_tried_again() -> None:
    tries: list[int] = []

    def work() -> int:
        tries.append(1)
        if len(tries) > 1:
            return 7
        try:
            raise error(1213, "Deadlock found")
        except exc.DBAPIError:
            raise error(1305, "SAVEPOINT sa_savepoint_1 does not exist")  # noqa: B904

    assert Database("sqlite://").run(work) == 7


# -- clusters -------------------------------------------------------------------------------------


def test_galera_commit_that_failed_may_have_been_done() -> None:
    """Error 1180 is ambiguous if the node lost its cluster during COMMIT.

    The other nodes may have the transaction.
    """
    unsure = error(1180, "Got error 6 during COMMIT")
    with pytest.raises(OutcomeUnknownError, match=r"during COMMIT.*look at task 7"):
        run(unsure, id=7)
    with pytest.raises(OutcomeUnknownError, match="look at task 7"):
        run(unsure, delaytasks.StaleVersionError("version 1, not 0"), id=7)
    with pytest.raises(StoreUnavailableError, match="during COMMIT"):
        run(unsure)


# -- unknown outcomes -----------------------------------------------------------------------------


def lost() -> exc.DBAPIError:
    failure = error("the connection broke")
    failure.connection_invalidated = True
    return failure


@pytest.mark.parametrize(
    "met", [delaytasks.StaleVersionError("version 1, not 0"), delaytasks.TaskStateError("it waits")]
)
def test_a_retry_refused_due_to_its_first_try_has_an_unknown_outcome(
    met: delaytasks.TaskStateError,
) -> None:
    with pytest.raises(OutcomeUnknownError, match=f"{met}.*look at task 7") as caught:
        run(lost(), met, id=7)
    assert caught.value.id == 7
    assert caught.value.__cause__ is met


def test_a_retry_without_a_free_connection_has_an_unknown_outcome() -> None:
    no_connection = exc.TimeoutError("all in use")
    with pytest.raises(OutcomeUnknownError, match=r"no free connection.*look at task 7") as caught:
        run(lost(), no_connection, id=7)
    assert caught.value.id == 7
    for id, failures in ((7, ()), (None, (lost(),))):
        with pytest.raises(StoreUnavailableError, match="no free connection"):
            run(*failures, no_connection, id=id)


def test_a_refusal_without_an_earlier_lost_answer_is_raised_unchanged() -> None:
    met = delaytasks.StaleVersionError("version 1, not 0")
    for failures in ((met,), (error("deadlock", state="40P01"), met)):
        with pytest.raises(delaytasks.StaleVersionError):
            run(*failures, id=7)
    with pytest.raises(delaytasks.DuplicateTaskError):
        run(lost(), delaytasks.DuplicateTaskError("there is one"), id=7)


# -- URLs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("postgresql://h/d", "postgresql+psycopg2://h/d"),
        ("postgres://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql+psycopg2://h/d?sslmode=require", "postgresql+psycopg2://h/d?sslmode=require"),
        ("postgresql+psycopg://me:p%40ss@h:5433/d", "postgresql+psycopg://me:p%40ss@h:5433/d"),
        ("postgresql+psycopg_async://h/d", "postgresql+psycopg://h/d"),
        ("postgresql+asyncpg://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql+asyncpg://h/d?ssl=require", "postgresql+psycopg2://h/d?sslmode=require"),
        ("mysql+aiomysql://h/d", "mysql+pymysql://h/d"),
        ("mysql+mysqldb://h/d?charset=utf8", "mysql+pymysql://h/d?charset=utf8"),
        ("mysql+mysqlconnector://h/d", "mysql+pymysql://h/d"),
        ("mariadb://h/d", "mariadb+pymysql://h/d"),
        ("sqlite+aiosqlite:////srv/d.sqlite3", "sqlite:////srv/d.sqlite3"),
        ("sqlite://", "sqlite://"),
    ],
)
def test_a_url_with_the_driver_of_the_callers_application_works(given: str, ours: str) -> None:
    assert Database(given).url.render_as_string(hide_password=False) == ours


@pytest.mark.parametrize("url", ["postgresql+pyodbc", "mysql+psycopg3", "sqlite+pysqlcipher"])
def test_an_unknown_driver_is_named_with_the_remedy(url: str) -> None:
    driver = url.partition("+")[2]
    with pytest.raises(ConfigError, match=rf"driver '{driver}'.*begin the URL with \w+://"):
        Database(f"{url}://h/d")


def test_an_option_that_the_driver_does_not_take_is_a_wrong_setting(mysql_url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"delaytasks_database_url has an option .* pymysql .*'ssl_mode'"
    ):
        Store(f"{mysql_url}?ssl_mode=REQUIRED", settings_for(mysql_url)).tasks.now()


PACKAGES = {"postgresql": "psycopg2-binary", "mysql": "'delaytasks[mysql]'"}
PACKAGES["postgresql+psycopg"] = "'delaytasks[psycopg]'"


@pytest.mark.parametrize("scheme", PACKAGES)
def test_a_missing_driver_has_a_remedy(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psycopg2", "psycopg", "pymysql"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install {re.escape(PACKAGES[scheme])}"):
        _ = Database(f"{scheme}://h/d").auto


# -- connections ----------------------------------------------------------------------------------


def test_options_of_the_postgresql_url_are_kept_and_win() -> None:
    given = make_url("postgresql://h/d?options=-c%20lock_timeout%3D1s")
    assert engines._postgresql_options(given).endswith(" -c lock_timeout=1s")
    usual = engines._postgresql_options(make_url("postgresql://h/d"))
    assert usual.startswith("-c lock_timeout=1s -c default_tr")


# -- values ---------------------------------------------------------------------------------------

QUOTING = [
    error(1062, f"Duplicate entry '{SECRET}' for key 'PRIMARY'", kind=exc.IntegrityError),
    error(1366, f"Incorrect string value: '{SECRET}' for column", kind=exc.DataError),
    error(1292, f"Truncated incorrect DOUBLE value: '{SECRET}'"),
    error(f'invalid input syntax for type integer: "{SECRET}"', state="22P02", kind=exc.DataError),
]


@pytest.mark.parametrize("failure", QUOTING)
def test_an_error_names_its_number_and_no_values(failure: Any) -> None:
    code = failure.orig.pgcode or failure.orig.args[0]
    with pytest.raises(delaytasks.StoreError, match=str(code)) as caught:
        run(failure)
    said: BaseException | None = caught.value
    while said is not None:
        assert SECRET not in f"{said!s} {said!r}"
        said = said.__cause__ or said.__context__
    assert SECRET not in f"{failure.orig!s} {failure.orig!r}"


@pytest.mark.parametrize(
    ("failure", "is_missing"),
    [
        *((error("gone", state=state), True) for state in ("42P01", "42703", "3F000")),
        *((error(code, "gone"), True) for code in (1146, 1054)),
        (sqlite_error("no such table: yb_delay_task_message"), True),
        (sqlite_error("table yb_delay_task_message has no column named meta"), True),
        (error('prepared statement "s_1" does not exist', state="26000"), False),
        (error(1305, "SAVEPOINT s does not exist"), False),
        (sqlite_error("no such savepoint: s"), False),
    ],
)
def test_missing_tables_are_told_from_others(failure: exc.DBAPIError, is_missing: bool) -> None:
    assert lacks_tables(failure.orig) == is_missing


def test_a_session_without_tables_may_be_on_another_database() -> None:
    database = Database("postgresql://ann:s3cr3t@db/shop")
    same = database.remedy_at(make_url("postgresql+asyncpg://bob:s3cr3t@db:5432/shop"))
    assert same == f"to make the tables, {TABLES_REMEDY}"
    other = database.remedy_at(make_url("postgresql+asyncpg://bob:s3cr3t@db/other"))
    assert "the session is on postgresql+asyncpg://bob:***@db/other, and" in other
    assert "database_url is postgresql+psycopg2://ann:***@db/shop: open the session" in other


# -- different URLs of the same database are recognized -------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("postgresql://me@h/d", "postgresql+psycopg://you@h:5432/d?sslmode=require"),
        ("postgresql://h1,h2/d", "postgresql://h2/d"),
        ("postgresql:///d?host=h1:5433&host=h2", "postgresql://h1:5433/d"),
        ("postgresql:///d?host=h1,h2&port=1,2", "postgresql:///d?host=h2:2&host=h1:1"),
        ("postgresql:///d?host=/run/a&port=5433", "postgresql:///d?host=/run/a&port=5433&user=me"),
        ("mysql://h/d", "mariadb+pymysql://h:3306/d"),
        ("sqlite:////srv/d", "sqlite+aiosqlite:////srv/d"),
    ],
)
def test_urls_that_may_name_the_same_server_have_a_common_address(one: str, other: str) -> None:
    assert addresses_of(make_url(one)) & addresses_of(make_url(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("postgresql:///d?host=h1&host=h2", "postgresql:///d?host=h3&host=h4"),
        ("postgresql:///d?host=h:1&host=i:1", "postgresql:///d?host=h:2&host=i:2"),
        ("postgresql:///d?host=h1,h2&port=1,2", "postgresql:///d?host=h1,h2&port=2,1"),
        ("postgresql:///d?host=/run/a", "postgresql:///d?host=/run/b"),
        ("postgresql:///d?service=a", "postgresql:///d?service=b"),
        ("postgresql://h/d", "postgresql://h/e"),
        ("mysql://localhost/d?unix_socket=/run/a", "mysql://localhost/d?unix_socket=/run/b"),
        ("mysql://h/d", "postgresql://h/d"),
        ("sqlite:////srv/d", "sqlite:////srv/e"),
    ],
)
def test_urls_of_different_servers_have_no_common_address(one: str, other: str) -> None:
    assert not addresses_of(make_url(one)) & addresses_of(make_url(other))


UNEQUAL = ["h1:5432,h2:5432/d", "/d?host=h1&host=h2&port=5432", "/d?host=h1,h2,h3&port=1,2"]
UNEQUAL += ["/d?host=h1:x&host=h2", "h1:5432,h2/d"]


@pytest.mark.parametrize("rest", UNEQUAL)
def test_unequal_numbers_of_hosts_and_ports_are_a_wrong_setting(rest: str) -> None:
    with pytest.raises(ConfigError, match=r"delaytasks_database_url .*host=h1:5432&host=h2:5432"):
        Database(f"postgresql://root@{rest}").auto.connect()


# -- A database that delaytasks does not support is refused, and not taken for another one --------


pytestmark = pytest.mark.quick

UNKNOWN: Any = SimpleNamespace(dialect=SimpleNamespace(name="oracle"))


USES: dict[str, Callable[[], object]] = {
    "capabilities": lambda: capabilities_of("oracle"),
    "estimates": lambda: estimate_rows(UNKNOWN, select(Table("t", MetaData(), Column("id")))),
    "migrations": lambda: exclusively(UNKNOWN, "", None).__enter__(),
    "DDL": lambda: ddl("oracle"),
    "comparison": lambda: comparison("oracle"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_unknown_database_is_refused_with_the_supported_ones(use: Any) -> None:
    with pytest.raises(ConfigError, match="'oracle'; it supports postgresql, mysql, mariadb, sqli"):
        use()


# -- COPY receives its text in parts --------------------------------------------------------------


class Interruption(BaseException):
    """Simulate the exception of a time limit."""


def rows(count: int, body: str = "{}") -> Iterator[tuple[Any, ...]]:
    return ((n, body, "2030-01-01", "tag") for n in range(count))


def test_all_rows_come_in_parts_and_then_nothing() -> None:
    text = _CopyFile(_copy_parts(rows(2 * _COPY_ROWS + 1)))
    parts = list(iter(partial(text.read, 8192), ""))
    assert [part.count("\n") for part in parts] == [_COPY_ROWS, _COPY_ROWS, 1]
    assert text.read(8192) == ""
    assert [part.count("\n") for part in _copy_parts(rows(2 * _COPY_ROWS))] == [_COPY_ROWS] * 2


def test_a_part_of_large_bodies_has_few_of_them() -> None:
    found = _copy_parts(rows(10, "x" * (_COPY_CHARACTERS // 2)))
    assert [part.count("\n") for part in found] == [2] * 5


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers")
def test_an_interruption_that_waited_while_the_driver_was_busy_is_kept() -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise Interruption

    text = _CopyFile(_copy_parts(rows(10)))
    # Both calls run in C, as in the driver. The signal arrives during the first call, and Python
    # runs its handler during the second call.
    calls = [partial(sum, range(20_000_000)), partial(text.read, 8192)]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interruption):
            list(map(operator.methodcaller("__call__"), calls))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert isinstance(text.interrupted, Interruption)


# An SQLite database whose URL is a `file:` URI


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file://localhost{}"])
def test_a_missing_file_of_a_uri_is_an_error_and_is_made_for_its_owner(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / "a file.sqlite3"
    uri = form.format(path).replace(" ", "%20")
    url = URL.create("sqlite", database=uri, query={"uri": "true"}).render_as_string()
    database = Database(url)
    database.expect_file()
    with pytest.raises(StoreError, match=r"there is no database .*a file"):
        database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
    assert not path.exists()
    database = Database(url)
    database.autocommitted(lambda c: c.exec_driver_sql("CREATE TABLE t (a)"))
    database.dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///file:a.db?uri=true", "a.db"),
        ("sqlite:///file:/x/a.db?mode=ro&uri=true", "/x/a.db"),
        ("sqlite:///file:a.db", "file:a.db"),
        ("sqlite:///a.db", "a.db"),
        ("sqlite:///file::memory:?uri=true", None),
        ("sqlite:///file:name?mode=memory&cache=shared&uri=true", None),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
    ],
)
def test_the_path_of_a_url(url: str, path: str | None) -> None:
    assert sqlite_path(make_url(url)) == (None if path is None else Path(path))
