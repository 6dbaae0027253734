"""Conflicts, refused logins and servers that cannot write."""

from __future__ import annotations

import logging
import random
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, event, make_url, select, text, update
from sqlalchemy.exc import DBAPIError

from delaytasks import DelayTasks, Status, StoreError, StoreUnavailableError
from delaytasks.core.events import Events, is_outage
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayedTask
from delaytasks.runtime import runtime_of
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import TRIES
from delaytasks.storage.engines import sqlite_path
from delaytasks.storage.store import Store
from tests.conftest import open_store, settings_for
from tests.recording import counted, delays_on, record
from tests.waiting import wait_until

# Deadlocks, serialization failures and lock timeouts: the number of retries, and the final
# error


#: Serialization failure, deadlock and lock timeout. SQLite raises none of them, because it waits.
CONFLICTS = [
    ("postgresql", "40001"),
    ("postgresql", "40P01"),
    ("postgresql", "55P03"),
    ("mysql", "1213"),
    ("mysql", "1205"),
]
PREFIX = "conflict_"


class Table:
    """A table on which a trigger raises a given number of conflicts."""

    def __init__(self, url: str, code: str) -> None:
        self.store = open_store(url, table_prefix=PREFIX)
        self._is_postgresql = self.store.database.url.get_backend_name() == "postgresql"
        self._made = self._on_postgresql(code) if self._is_postgresql else self._on_mysql(code)
        self.drop()
        for statement in self._made[0]:
            self.execute(statement)

    def execute(self, statement: str) -> Any:
        return self.store.database.autocommitted(lambda c: c.execute(text(statement)))

    def drop(self) -> None:
        for statement in self._made[1]:
            self.execute(statement)

    def conflict(self, times: int) -> None:
        if self._is_postgresql:
            self.execute(f"SELECT setval('{PREFIX}left', {times + 1})")
        else:
            self.execute(f"UPDATE {PREFIX}left SET n = {times}")

    @property
    def left(self) -> int:
        """Return how many conflicts the trigger still raises."""
        found = (
            f"SELECT last_value - 1 FROM {PREFIX}left"
            if self._is_postgresql
            else f"SELECT n FROM {PREFIX}left"
        )
        return int(self.store.database.autocommitted(lambda c: c.execute(text(found)).scalar_one()))

    def _on_postgresql(self, code: str) -> tuple[list[str], list[str]]:
        """Count with a sequence, because a rollback does not undo it."""
        name = self.store.schema.tasks.name
        return [
            f"CREATE SEQUENCE {PREFIX}left INCREMENT -1 MINVALUE 1 MAXVALUE 1000 START 1",
            f"""CREATE FUNCTION {PREFIX}raise() RETURNS trigger AS $$ BEGIN
                IF (SELECT last_value FROM {PREFIX}left) > 1 THEN
                    PERFORM nextval('{PREFIX}left');
                    RAISE EXCEPTION 'as asked' USING ERRCODE = '{code}';
                END IF;
                RETURN NEW; END $$ LANGUAGE plpgsql""",
            f"CREATE TRIGGER {PREFIX}raise BEFORE INSERT OR UPDATE ON {name} "
            f"FOR EACH ROW EXECUTE FUNCTION {PREFIX}raise()",
        ], [
            f"DROP TRIGGER IF EXISTS {PREFIX}raise ON {name}",
            f"DROP FUNCTION IF EXISTS {PREFIX}raise",
            f"DROP SEQUENCE IF EXISTS {PREFIX}left",
        ]

    def _on_mysql(self, code: str) -> tuple[list[str], list[str]]:
        """Count in a MyISAM table, because MyISAM has no transactions to roll back."""
        name = self.store.schema.tasks.name
        raising = f"""BEGIN IF (SELECT n FROM {PREFIX}left) > 0 THEN
            UPDATE {PREFIX}left SET n = n - 1;
            SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = {code}, MESSAGE_TEXT = 'as asked';
            END IF; END"""
        triggers = [
            f"CREATE TRIGGER {PREFIX}{move} BEFORE {move} ON {name} FOR EACH ROW {raising}"
            for move in MOVES
        ]
        return [
            f"CREATE TABLE {PREFIX}left (n int) ENGINE = MyISAM",
            f"INSERT INTO {PREFIX}left VALUES (0)",
            *triggers,
        ], [
            *(f"DROP TRIGGER IF EXISTS {PREFIX}{move}" for move in MOVES),
            f"DROP TABLE IF EXISTS {PREFIX}left",
        ]


MOVES = ("INSERT", "UPDATE")


@pytest.fixture(params=CONFLICTS, ids=["-".join(conflict) for conflict in CONFLICTS])
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    database, code = request.param
    made = Table(request.getfixturevalue(f"{database}_url"), code)
    yield made
    made.drop()
    made.store.close()


def task(store: Store, id: int) -> DelayedTask:
    now = store.tasks.now()
    return DelayedTask(id, "mail", "{}", now, create_time=now)


@pytest.mark.slow
def test_a_transaction_with_conflicts_is_tried_five_times(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: least)
    store = table.store
    claims = store.claims("w", None)
    claimed: list[DelayedTask] = []
    verbs: list[tuple[str, Callable[[], Any]]] = [
        ("schedule", lambda: store.tasks.insert(task(store, 1))),
        ("schedule many", lambda: store.tasks.insert_many([task(store, id) for id in (2, 3)])),
        ("claim", lambda: claimed.extend(claims.claim_due("default", [0], 1))),
        ("settle", lambda: claims.settle([Settlement(claimed[0], "succeed")])),
        ("reschedule", lambda: store.tasks.reschedule(2, store.tasks.now())),
    ]
    for name, verb in verbs:
        table.conflict(TRIES - 1)
        verb()
        assert table.left == 0, name
    assert counted(store)[Status.DONE] == 1
    for name, verb in [
        ("claim", verbs[2][1]),
        ("schedule", lambda: store.tasks.insert(task(store, 9))),
    ]:
        table.conflict(100)
        with pytest.raises(StoreUnavailableError, match=f"stayed busy for {TRIES} tries"):
            verb()
        assert table.left == 100 - TRIES, name
    table.conflict(0)
    assert store.tasks.get(9) is None
    assert counted(store)[Status.NOT_COMPLETE] == 2


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql", "mysql"])
def test_a_deadlock_with_another_program_is_retried_until_it_succeeds(
    database: str, request: pytest.FixtureRequest
) -> None:
    """The other transaction locks the two rows in reverse order, and the database chooses the
    victim."""
    store = open_store(request.getfixturevalue(f"{database}_url"), table_prefix=PREFIX)
    t, claims = store.schema.tasks, store.claims("w", None)
    for id in (1, 2):
        store.tasks.insert(task(store, id))
    running = claims.claim_due("default", [0], 2)
    ends = [Settlement(task, "succeed") for task in running]
    with ThreadPoolExecutor(1) as pool:
        try:
            with store.database.tx.begin() as stranger:
                if database == "postgresql":  # other programs do not have our short timeout
                    stranger.exec_driver_sql("SET LOCAL lock_timeout = 0")
                stranger.execute(update(t).where(t.c.id == 2).values(priority=1))
                settling = pool.submit(claims.settle, ends)
                wait_until(lambda: is_locked(store, 1), 5, "us to have the first row")
                stranger.execute(update(t).where(t.c.id == 1).values(priority=1))
        except DBAPIError as error:  # the database chose the other transaction as the victim
            if "deadlock" not in str(error).lower():
                raise
        assert settling.result(10) == {1, 2}
    assert counted(store)[Status.DONE] == 2
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql", "mysql"])
def test_a_locked_row_is_waited_for_in_five_tries(
    database: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    monkeypatch.setattr(random, "uniform", lambda least, most: tries.append(least) or least)
    store = open_store(request.getfixturevalue(f"{database}_url"), table_prefix=PREFIX)
    t, id = store.schema.tasks, 1
    store.tasks.insert(task(store, id))
    later = store.tasks.now() + timedelta(hours=1)
    with ThreadPoolExecutor(1) as pool:
        with store.database.tx.begin() as stranger:
            stranger.execute(update(t).where(t.c.id == id).values(priority=1))
            moving = pool.submit(store.tasks.reschedule, id, later)
            wait_until(lambda: tries, 3, "a second try")
        assert moving.result(2).version == 1, "let go in time, it is ours"
    tries.clear()
    with store.database.tx.begin() as stranger:
        stranger.execute(update(t).where(t.c.id == id).values(priority=2))
        with pytest.raises(StoreUnavailableError, match=f"stayed busy for {TRIES} tries"):
            store.tasks.reschedule(id, later)
    assert len(tries) == TRIES - 1
    assert store.tasks.get(id).version == 1  # type: ignore[union-attr]
    store.close()


@pytest.mark.slow
def test_a_read_of_a_table_that_a_migration_has_locked_waits(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    monkeypatch.setattr(random, "uniform", lambda least, most: tries.append(least) or least)
    store = open_store(postgresql_url, table_prefix=PREFIX)
    now = store.tasks.now()
    store.tasks.insert(task(store, 1))
    with ThreadPoolExecutor(1) as pool:
        with store.database.tx.begin() as migration:
            migration.execute(
                text(f"LOCK TABLE {store.schema.tasks.name} IN ACCESS EXCLUSIVE MODE")
            )
            near = pool.submit(
                lambda: list(
                    store.sweeps.due_between(now - timedelta(days=1), now + timedelta(days=1), 0, 1)
                )
            )
            wait_until(lambda: tries, 3, "a second try")
        assert [[entry.id for entry in some] for some in near.result(2)] == [[1]]
    store.close()


def is_locked(store: Store, id: int) -> bool:
    t = store.schema.tasks
    with store.database.tx.begin() as connection:
        return (
            connection.execute(
                select(t.c.id).where(t.c.id == id).with_for_update(skip_locked=True)
            ).first()
            is None
        )


# After a primary becomes a replica, the pools drop their connections to it and open new ones


#: These statements make a session refuse writes, like the server of a former primary.
READ_ONLY = {
    "postgresql": "SET default_transaction_read_only = on",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
}


class Cluster:
    """A cluster whose new connections lead to the former primary until `is_promoted` is set."""

    def __init__(self, delays: DelayTasks) -> None:
        self._database = runtime_of(delays).store.database
        self.is_promoted = True
        for engine in (self._database.auto, self._database.tx):
            event.listen(engine, "connect", self._connected)
        self._database.dispose()

    def _connected(self, connection: Any, _record: Any) -> None:
        if not self.is_promoted:
            with connection.cursor() as cursor:
                cursor.execute(READ_ONLY[self._database.url.get_backend_name()])
            connection.commit()

    def demote(self) -> None:
        """Fill both pools with connections to the server that becomes the former primary."""
        self._database.dispose()
        self.is_promoted = False
        for engine in (self._database.auto, self._database.tx):
            connections = [engine.connect() for _ in range(3)]
            for connection in connections:
                connection.close()
        self.is_promoted = True


@pytest.fixture(params=["postgresql_url", "mysql_url"])
def delays(request: pytest.FixtureRequest) -> Iterator[DelayTasks]:
    url: str = request.getfixturevalue(request.param)
    open_store(url, table_prefix="demoted_").close()
    made = delays_on(url, table_prefix="demoted_")
    record(made)
    yield made
    made.close()


CALLS: dict[str, Callable[[DelayTasks, DelayedTask], Any]] = {
    "schedule": lambda d, task: d.schedule_delay("mail", {}, 5),
    "schedule with a key": lambda d, task: d.schedule_delay("mail", {}, 5, key="new"),
    "schedule_many": lambda d, task: d.schedule_many([("mail", {}, 5)] * 3),
    "cancel": lambda d, task: d.cancel(task),
    "reschedule": lambda d, task: d.reschedule(task, 5),
    "touch": lambda d, task: d.touch(task, 500),
    "claim": lambda d, task: runtime_of(d).store.claims("w", None).claim_due("default", [0], 1),
    "sweep": lambda d, task: runtime_of(d).sweeper.sweep(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_after_a_demotion_the_next_call_reaches_the_new_primary(
    delays: DelayTasks, name: str
) -> None:
    task = delays.schedule_delay("mail", {}, 0, key="k")
    cluster = Cluster(delays)
    cluster.demote()
    assert CALLS[name](delays, task) or name == "sweep"


# A PostgreSQL server that answers but refuses writes is logged one time, not once for each
# stage


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG]
    return [line for line in found if line.startswith("loop.failed")]


@pytest.mark.slow
def test_a_read_only_database_is_logged_once_for_all_stages(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner, events = open_store(postgresql_url, table_prefix="ro_"), Events()
    url = make_url(postgresql_url).update_query_dict(
        {"options": "-c default_transaction_read_only=on"}
    )
    text = url.render_as_string(hide_password=False)
    store = Store(text, settings_for(text, table_prefix="ro_"))
    stages = {
        "seen": lambda: store.workers.report("w", ["default"], "solo", 1, 0),
        "expire": lambda: store.workers.expire(60),
        "sweep partition 0": lambda: store.sweeps.begin_sweep(0, 1, 4),
        "read": store.workers.all,
    }
    caplog.set_level(logging.DEBUG, "delaytasks")
    for _ in range(3):
        for stage, work in stages.items():
            events.attempt("sweep", stage, work)
    assert len(lines(caplog)) == 1
    assert events.counts["loop.failed"] >= 6  # subscribers receive each failure
    for stage in stages:  # the server accepts writes again
        assert events.attempt("sweep", stage, lambda: None)
    events.attempt("sweep", "seen", stages["seen"])
    assert len(lines(caplog)) == 2
    store.close()
    owner.schema.metadata.drop_all(owner.database.tx)
    owner.close()


def test_another_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()

    def fail(reason: str) -> None:
        raise StoreUnavailableError(reason, is_unable=True)

    for reason in ("read-only", "read-only", "disk is full", "disk is full"):
        events.attempt("sweep", "seen", lambda reason=reason: fail(reason))  # type: ignore[misc]
    assert len(lines(caplog)) == 2


# A database that refuses logins counts as unavailable, like a server that does not answer


def refused(url: str, what: str, tmp_path: Path) -> str:
    """Return a URL whose connections the database refuses."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return f"sqlite:///{tmp_path}"  # the path is a folder, not a file
    changed = {
        "user": parsed.set(username="nobody_of_this_name", password="wrong"),
        "database": parsed.set(database="no_database_of_this_name"),
    }
    return changed[what].render_as_string(hide_password=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["user", "database"])
def test_an_error_while_connecting_is_an_outage(
    database_url: str, tmp_path: Path, what: str
) -> None:
    database = Database(refused(database_url, what, tmp_path))
    with pytest.raises(StoreUnavailableError, match="cannot be reached") as raised:
        database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
    assert is_outage(raised.value)
    database.dispose()


def test_a_user_who_is_locked_out_while_running_is_an_outage(mysql_url: str) -> None:
    owner = Database(mysql_url)
    name = make_url(mysql_url).database
    user = f"locked_{name}"[:32]

    def do(*statements: str) -> None:
        owner.autocommitted(lambda c: [c.exec_driver_sql(one) for one in statements])

    do(f"CREATE USER '{user}'@'%%' IDENTIFIED BY 'p'", f"GRANT ALL ON {name}.* TO '{user}'@'%%'")
    try:
        url = make_url(mysql_url).set(username=user, password="p")
        database = Database(url.render_as_string(hide_password=False))
        database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
        do(f"ALTER USER '{user}'@'%%' ACCOUNT LOCK")
        database.dispose()
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1"))
        database.dispose()
    finally:
        do(f"DROP USER '{user}'@'%%'")
        owner.dispose()


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
