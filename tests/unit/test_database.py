"""The store classifies a driver's errors and retries the statement where that is safe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import and_, column, event, exc, make_url, select
from sqlalchemy.dialects import mysql, postgresql, sqlite

from delaytasks.core.errors import (
    ConfigError,
    DuplicateTaskError,
    InvalidStatusError,
    OutcomeUnknownError,
    StaleVersionError,
    StoreError,
    StoreUnavailableError,
    TaskStateError,
)
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.core.text import TABLES_REMEDY
from delaytasks.storage import engines
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import lacks_tables, translate
from delaytasks.storage.store import Store
from delaytasks.storage.types import UTCDateTime, db_now, is_past
from tests.conftest import open_store, settings_for
from tests.recording import counted

SECRET = "s3cr3t-canary"


class DriverError(Exception):
    """Stand for an exception of a database driver."""


def error(
    *args: Any, state: str | None = None, kind: type[exc.DBAPIError] = exc.OperationalError
) -> exc.DBAPIError:
    made = type("DriverError", (DriverError,), {"pgcode": state})(*args)
    return kind("UPDATE", None, made)


def sqlite_error(text: str, kind: type[exc.DBAPIError] = exc.OperationalError) -> exc.DBAPIError:
    return kind(
        "UPDATE", None, type("OperationalError", (Exception,), {"__module__": "sqlite3"})(text)
    )


# -- servers that cannot work ---------------------------------------------------------------------

UNABLE = [
    *(
        error("no", state=state)
        for state in ("53100", "53200", "57014", "57P01", "57P02", "58030", "25006")
    ),
    *(error(code, "no") for code in (1021, 1040, 1053, 1114, 1203, 1226, 1317)),
    *(error(code, "no") for code in (1047, 1180, 1290, 1792, 1836, 1874, 3100)),
    *map(
        sqlite_error,
        ("database or disk is full", "disk I/O error", "attempt to write a readonly database"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    UNABLE,
    ids=lambda failure: (
        str(failure.orig.pgcode or failure.orig.args[0])
        if hasattr(failure.orig, "pgcode")
        else str(failure.orig)
    ),
)
def test_a_server_that_answers_but_cannot_work_is_unavailable(failure: exc.DBAPIError) -> None:
    assert isinstance(translate(failure), StoreUnavailableError)
    with pytest.raises(StoreUnavailableError, match="cannot work now"):
        Database("sqlite://").run(raising(failure))


def test_an_error_in_a_statement_is_not_an_outage() -> None:
    for failure in (
        error("syntax", state="42601"),
        error(1064, "syntax"),
        sqlite_error("near x: syntax error"),
    ):
        made = translate(failure)
        assert isinstance(made, StoreError)
        assert not isinstance(made, StoreUnavailableError)


def raising(*failures: Exception) -> Callable[[], Any]:
    """Return a function that raises these errors in order, and then repeats the last one."""
    left = list(failures)

    def work() -> Any:
        raise left.pop(0) if len(left) > 1 else left[0]

    return work


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[tuple[Store, list[int]]]:
    """Yield a store and the limit of its database's pages, which a test can lower."""
    pages = [100_000]
    store = open_store(f"sqlite:///{tmp_path / 'tight.sqlite3'}")
    for engine in (store.database.auto, store.database.tx):
        event.listen(
            engine, "checkout", lambda c, *_: c.execute(f"PRAGMA max_page_count = {pages[0]}")
        )
    yield store, pages
    store.close()


def test_a_full_disk_leaves_no_partial_change_and_counts_as_an_outage(
    tight: tuple[Store, list[int]],
) -> None:
    store, pages = tight
    now = store.tasks.now()
    tasks = [
        DelayTask(id, "mail", '"' + "x" * 100_000 + '"', now, create_time=now)
        for id in range(1, 11)
    ]
    keyed = DelayTask(50, "mail", '"' + "x" * 400_000 + '"', now, key="k", create_time=now)
    store.tasks.insert(tasks[0])
    claims = store.claims("w", None)
    [claimed] = claims.claim_due("default", [0], 1)
    pages[0] = 1  # SQLite does not reduce the limit below the current number of pages.
    with pytest.raises(StoreUnavailableError, match="full"):
        store.tasks.insert_many(tasks[1:])
    with pytest.raises(StoreUnavailableError, match="full"):
        store.tasks.insert_keyed(keyed, "reject")
    with pytest.raises(StoreUnavailableError, match="full"):
        claims.settle([Settlement(claimed, "fail", error="x" * 400_000)])
    assert sum(counted(store).values()) == 1
    assert store.tasks.id_of_key("mail", "k") is None
    pages[0] = 100_000
    assert claims.settle([Settlement(claimed, "fail", error="x" * 400_000)]) == {1}
    assert store.tasks.insert_many(tasks[1:])


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
        Database("sqlite://").run(raising(unsure), 7)
    with pytest.raises(OutcomeUnknownError, match="look at task 7"):
        Database("sqlite://").run(raising(unsure, StaleVersionError("version 1, not 0")), 7)
    with pytest.raises(StoreUnavailableError, match="during COMMIT"):
        Database("sqlite://").run(raising(unsure))


# -- unknown outcomes -----------------------------------------------------------------------------


def lost() -> exc.DBAPIError:
    failure = error("the connection broke")
    failure.connection_invalidated = True
    return failure


@pytest.mark.parametrize(
    "met", [StaleVersionError("version 1, not 0"), InvalidStatusError("it waits")]
)
def test_a_retry_refused_because_of_its_own_first_try_has_an_unknown_outcome(
    met: TaskStateError,
) -> None:
    with pytest.raises(OutcomeUnknownError, match=f"{met}.*look at task 7") as caught:
        Database("sqlite://").run(raising(lost(), met), 7)
    assert caught.value.id == 7
    assert caught.value.__cause__ is met


def test_a_retry_without_a_free_connection_has_an_unknown_outcome() -> None:
    with pytest.raises(OutcomeUnknownError, match=r"no free connection.*look at task 7") as caught:
        Database("sqlite://").run(raising(lost(), exc.TimeoutError("all in use")), 7)
    assert caught.value.id == 7
    for id, failures in ((7, ()), (None, (lost(),))):
        with pytest.raises(StoreUnavailableError, match="no free connection"):
            Database("sqlite://").run(raising(*failures, exc.TimeoutError("all in use")), id)


def test_a_refusal_without_an_earlier_lost_answer_is_raised_unchanged() -> None:
    met = StaleVersionError("version 1, not 0")
    for failures in ((met,), (error("deadlock", state="40P01"), met)):
        with pytest.raises(StaleVersionError):
            Database("sqlite://").run(raising(*failures), 7)
    with pytest.raises(DuplicateTaskError):
        Database("sqlite://").run(raising(lost(), DuplicateTaskError("there is one")), 7)


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


@pytest.mark.parametrize(
    "url", ["postgresql+pyodbc://h/d", "mysql+psycopg3://h/d", "sqlite+pysqlcipher://"]
)
def test_an_unknown_driver_is_named_with_the_remedy(url: str) -> None:
    driver = url.partition("+")[2].partition(":")[0]
    with pytest.raises(ConfigError, match=rf"driver '{driver}'.*begin the URL with \w+://"):
        Database(url)


def test_an_option_that_the_driver_does_not_take_is_a_wrong_setting(mysql_url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"delaytasks_database_url has an option .* pymysql .*'ssl_mode'"
    ):
        Store(f"{mysql_url}?ssl_mode=REQUIRED", settings_for(mysql_url)).tasks.now()


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("postgresql://h/d", "psycopg2-binary"),
        ("postgresql+psycopg://h/d", "'delaytasks[psycopg]'"),
        ("mysql://h/d", "'delaytasks[mysql]'"),
    ],
)
def test_a_driver_that_is_not_installed_is_named_with_the_package(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("psycopg2", "psycopg", "pymysql"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install {re.escape(package)}"):
        _ = Database(url).auto


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_url_of_another_postgresql_driver_reaches_the_same_database(
    postgresql_url: str, driver: str
) -> None:
    url = (
        make_url(postgresql_url)
        .set(drivername=f"postgresql+{driver}")
        .render_as_string(hide_password=False)
    )
    store = Store(url, settings_for(url))
    assert store.tasks.now().tzinfo is not None
    store.close()


# -- connections ----------------------------------------------------------------------------------


def test_options_of_the_postgresql_url_are_kept_and_win() -> None:
    given = make_url("postgresql://h/d?options=-c%20lock_timeout%3D1s")
    assert engines._postgresql_options(given).endswith(" -c lock_timeout=1s")
    assert engines._postgresql_options(make_url("postgresql://h/d")).startswith(
        "-c lock_timeout=1s -c default_tr"
    )


# -- values ---------------------------------------------------------------------------------------

QUOTING = [
    error(1062, f"Duplicate entry '{SECRET}' for key 'PRIMARY'", kind=exc.IntegrityError),
    error(1366, f"Incorrect string value: '{SECRET}' for column", kind=exc.DataError),
    error(1292, f"Truncated incorrect DOUBLE value: '{SECRET}'"),
    error(f'invalid input syntax for type integer: "{SECRET}"', state="22P02", kind=exc.DataError),
]


@pytest.mark.parametrize("number", range(len(QUOTING)))
def test_an_error_names_its_number_and_no_values(number: int) -> None:
    failure = QUOTING[number]
    code = failure.orig.pgcode or failure.orig.args[0]  # type: ignore[union-attr]
    with pytest.raises(StoreError, match=str(code)) as caught:
        Database("sqlite://").run(raising(failure))
    said: BaseException | None = caught.value
    while said is not None:
        assert SECRET not in f"{said!s} {said!r}"
        said = said.__cause__ or said.__context__
    assert SECRET not in f"{failure.orig!s} {failure.orig!r}"


@pytest.mark.parametrize(
    "dialect", [sqlite.dialect(), mysql.dialect(), postgresql.dialect()], ids=lambda one: one.name
)
def test_the_condition_for_past_times_can_use_an_index(dialect: Any) -> None:
    due = column("due", UTCDateTime())
    compiled = str(
        select(due)
        .where(and_(column("status") == 0, is_past(due, db_now())))
        .compile(dialect=dialect)
    )
    assert "= 1" not in compiled, compiled


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
def test_missing_tables_are_told_from_other_things_that_do_not_exist(
    failure: exc.DBAPIError, is_missing: bool
) -> None:
    assert lacks_tables(failure.orig) == is_missing


def test_a_session_without_tables_may_be_on_another_database() -> None:
    database = Database("postgresql://ann:s3cr3t@db/shop")
    same = database.remedy_at(make_url("postgresql+asyncpg://bob:s3cr3t@db:5432/shop"))
    assert same == f"to make the tables, {TABLES_REMEDY}"
    other = database.remedy_at(make_url("postgresql+asyncpg://bob:s3cr3t@db/other"))
    assert "the session is on postgresql+asyncpg://bob:***@db/other, and" in other
    assert "database_url is postgresql+psycopg2://ann:***@db/shop: open the session" in other
