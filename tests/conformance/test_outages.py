"""Conflicts, refused logins and servers that cannot write."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select, text, update
from sqlalchemy.exc import DBAPIError

from delaytasks import DelayedTask, OutcomeUnknownError, Status, StoreUnavailableError
from delaytasks.db.types import db_now_plus
from delaytasks.loops import limit_answers
from delaytasks.operate.health import HealthChecks, verdict_of
from delaytasks.operate.state import read_state
from delaytasks.runtime import runtime_of
from tests.conftest import new_world
from tests.waiting import wait_until
from tests.world import MainProcess, MonkeyPatch, Settlement, World
from tests.world.recording import delays_on, refusing, set_columns

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
TRIES = 5
MOVES = ("INSERT", "UPDATE")


def execute(world: World, *statements: str) -> None:
    with world.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


class Conflicts:
    """A trigger that raises a given number of conflicts on the table of tasks."""

    def __init__(self, world: World, code: str) -> None:
        self.world, self._is_postgresql = world, world.kind == "postgresql"
        made, self._dropped = (self._on_postgresql if self._is_postgresql else self._on_mysql)(code)
        execute(self.world, *self._dropped, *made)

    def close(self) -> None:
        execute(self.world, *self._dropped)

    def conflict(self, times: int) -> None:
        if self._is_postgresql:
            execute(self.world, f"SELECT setval('{PREFIX}left', {times + 1})")
        else:
            execute(self.world, f"UPDATE {PREFIX}left SET n = {times}")

    @property
    def left(self) -> int:
        """Return how many conflicts the trigger still raises."""
        column = "last_value - 1" if self._is_postgresql else "n"
        with self.world.begin() as connection:
            return int(connection.execute(text(f"SELECT {column} FROM {PREFIX}left")).scalar_one())

    def _on_postgresql(self, code: str) -> tuple[list[str], list[str]]:
        """Count with a sequence, because a rollback does not undo it."""
        name = self.world.table().name
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
        name = self.world.table().name
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


@pytest.fixture(params=CONFLICTS, ids=["-".join(conflict) for conflict in CONFLICTS])
def conflicts(request: pytest.FixtureRequest) -> Iterator[Conflicts]:
    database, code = request.param
    url = request.getfixturevalue(f"{database}_url")
    with new_world(World, url, table_prefix=PREFIX) as world, closing(Conflicts(world, code)) as it:
        yield it


@pytest.fixture(params=["postgresql_url", "mysql_url"])
def own(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose tables no other test uses, on the databases with row locks."""
    with new_world(World, request.getfixturevalue(request.param), table_prefix=PREFIX) as made:
        yield made


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rests before tries of a transaction, which are as short as possible."""
    found: list[float] = []
    monkeypatch.setattr(random, "uniform", lambda least, most: found.append(least) or least)
    return found


@pytest.mark.slow
def test_a_transaction_with_conflicts_is_tried_five_times(
    conflicts: Conflicts, tries: list[float]
) -> None:
    world, claimed = conflicts.world, list[DelayedTask]()
    verbs: dict[str, Callable[[], Any]] = {
        "schedule": lambda: world.delays.schedule_delay("note", None, 0, key="k"),
        "schedule many": lambda: world.delays.schedule_many([("note", None, 0)] * 3),
        "claim": lambda: claimed.extend(world.claim_due(most=3)),
        "settle": lambda: world.settle(claimed.pop()),
        "reschedule": lambda: world.delays.reschedule(world.delays.find(status=0).tasks[0], 0),
    }
    for name, verb in verbs.items():
        conflicts.conflict(TRIES - 1)
        verb()
        assert conflicts.left == 0, name
    counted = world.counted()
    assert (counted[Status.DONE], counted[Status.RUNNING]) == (1, 2)
    assert sorted(one.key or "" for one in claimed) == ["", "k"]
    for name in ("claim", "settle", "settle", "schedule many"):
        conflicts.conflict(100)
        with pytest.raises(StoreUnavailableError, match=f"stayed busy for {TRIES} tries"):
            verbs[name]()
        assert conflicts.left == 100 - TRIES, name
    assert world.counted() == counted


@pytest.mark.slow
def test_a_deadlock_with_another_program_is_retried_until_it_succeeds(own: World) -> None:
    """The other transaction locks the two rows in reverse order, and the database chooses the
    victim."""
    tasks = [own.put(), own.put()]
    ends, t = [Settlement(one, "succeed") for one in own.claim(*tasks)], own.table()
    first, second = [update(t).where(t.c.id == task.id).values(priority=1) for task in tasks]
    with ThreadPoolExecutor(1) as pool:
        try:
            with own.engine.begin() as stranger:
                if own.kind == "postgresql":  # other programs do not have our short timeout
                    stranger.exec_driver_sql("SET LOCAL lock_timeout = 0")
                stranger.execute(second)
                settling = pool.submit(own.worker().settle, ends)
                wait_until(lambda: is_locked(own, tasks[0]), 5, "us to have the first row")
                stranger.execute(first)
        except DBAPIError as error:  # the database chose the other transaction as the victim
            if "deadlock" not in str(error).lower():
                raise
        assert settling.result(10) == {task.id for task in tasks}
    assert own.counted()[Status.DONE] == 2


@pytest.mark.slow
def test_a_locked_row_is_waited_for_in_five_tries(own: World, tries: list[float]) -> None:
    task = own.schedule(delay=60)
    with ThreadPoolExecutor(1) as pool:
        with own.locked(task):
            moving = pool.submit(own.delays.reschedule, task, 3600)
            wait_until(lambda: tries, 10, "a second try")
        assert moving.result(10).version == 1, "let go in time, it is ours"
    tries.clear()
    refused = pytest.raises(StoreUnavailableError, match=f"stayed busy for {TRIES} tries")
    with own.locked(task), refused:
        own.delays.reschedule(task.id, 3600)
    assert len(tries) == TRIES - 1
    assert own.read(task).version == 1


@pytest.mark.slow
def test_a_read_of_a_table_that_a_migration_has_locked_waits(
    postgresql_url: str, tries: list[float]
) -> None:
    with new_world(World, postgresql_url, table_prefix=PREFIX) as own, ThreadPoolExecutor(1) as run:
        task = own.schedule(delay=60)
        with own.begin() as migration:
            migration.exec_driver_sql(f"LOCK TABLE {own.table().name} IN ACCESS EXCLUSIVE MODE")
            near = run.submit(own.due_within, 600, 10)
            wait_until(lambda: tries, 10, "a second try")
        assert [entry.id for entry in near.result(10)] == [task.id]


def is_locked(world: World, task: DelayedTask) -> bool:
    t = world.table()
    query = select(t.c.id).where(t.c.id == task.id).with_for_update(skip_locked=True)
    with world.begin() as connection:
        return connection.execute(query).first() is None


# After a primary becomes a replica, the pools drop their connections to it and open new ones


#: These statements make a session refuse writes, like the server of a former primary.
READ_ONLY = {
    "postgresql": "SET default_transaction_read_only = on",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
}
CALLS: dict[str, Callable[[World, DelayedTask], Any]] = {
    "schedule": lambda w, task: w.delays.schedule_delay("mail", {}, 5),
    "schedule with a key": lambda w, task: w.delays.schedule_delay("mail", {}, 5, key="new"),
    "schedule_many": lambda w, task: w.delays.schedule_many([("mail", {}, 5)] * 3),
    "cancel": lambda w, task: w.delays.cancel(task),
    "reschedule": lambda w, task: w.delays.reschedule(task, 5),
    "touch": lambda w, task: w.delays.touch(task, 500),
    "claim": lambda w, task: w.claim_due(),
    "sweep": lambda w, task: w.sweep(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_after_a_demotion_the_next_call_reaches_the_new_primary(own: World, name: str) -> None:
    task = own.schedule(key="k")
    own.demote(READ_ONLY[own.kind])
    assert CALLS[name](own, task)


# A server that answers but refuses writes is logged once for each statement, not for each stage


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG]
    return [line for line in found if line.startswith("loop.failed")]


def test_a_read_only_database_is_unhealthy_and_restarts_no_worker(postgresql_url: str) -> None:
    with new_world(World, postgresql_url, table_prefix="ro_") as world:
        world.store.workers.report("celery@host", ["default"], "prefork", 2, 0)
        set_columns(world.store, "workers", seen_at=db_now_plus(-600))
        worker, api = (HealthChecks(world.runtime, of, "host") for of in ("worker", "api"))
        [silent] = worker.live()
        assert not silent.is_ok
        world.reconnect(READ_ONLY["postgresql"])
        [unknown] = worker.live()
        assert (unknown.is_ok, "read-only" in unknown.detail) == (True, True)
        database = api.ready()[0]
        assert (database.is_ok, "read-only" in database.detail) == (False, True)
        verdict = verdict_of(read_state(runtime_of(world.delays)))
        assert (verdict.level, verdict.headline) == ("bad", "Stopped. The database is read-only.")
        world.reconnect()
        assert api.ready()[0].is_ok


def test_another_reason_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    main = MainProcess(world)
    for reason in ("read-only", "read-only", "disk is full", "disk is full"):
        with refusing(world.delays, StoreUnavailableError(reason, is_unable=True)):
            main.sweep()
    main.close()
    assert [line.partition(": ")[2].split("'")[0] for line in lines(caplog)] == [
        "read-only",
        "disk is full",
    ]


def test_a_full_sqlite_file_is_reported_and_leaves_no_partial_change(
    sqlite_path: Callable[..., str],
) -> None:
    with new_world(World, sqlite_path(), table_prefix=PREFIX) as world:
        tasks = [("note", "x" * 10_000, 60)] * 500
        world.reconnect("PRAGMA max_page_count = 500")
        with pytest.raises(StoreUnavailableError, match="cannot work now") as raised:
            world.delays.schedule_many(tasks)
        assert raised.value.is_unable
        assert world.delays.find().tasks == []
        world.reconnect()
        assert world.delays.schedule_many(tasks) == 500


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


SLEEP = {"postgresql": "SELECT pg_sleep({})", "mysql": "SELECT SLEEP({})"}


def test_a_call_whose_server_falls_silent_ends(world: World, monkeypatch: MonkeyPatch) -> None:
    """A frozen server, as this proxy, still acknowledges what it receives."""
    if world.kind == "sqlite":
        return  # it has no server
    for name in ("CHECK_S", "RETRY_FOR_S"):
        monkeypatch.setattr(f"delaytasks.db.database.{name}", 0.05)
    monkeypatch.setattr("delaytasks.db.database.ANSWER_LIMIT_S", 0.5)
    with world.proxied() as (proxy, delays):
        task = delays.schedule_delay("lost", 1, 60)
        delays.reschedule(task, 70)  # opens a connection of the other kind
        proxy.strand()
        rescue = threading.Timer(10, proxy.reset)
        rescue.start()
        with pytest.raises(OutcomeUnknownError, match=r"has not answered for 0\.5 s"):
            delays.cancel(task)
        assert delays.schedule_delay("lost", 1, 60)  # no other connection leads to that server
        parts = delays._runtime.store.database.stream(text("SELECT 1 UNION SELECT 2"), 1)
        assert next(parts)
        proxy.strand()
        del parts  # a sweep that fails between two parts
        assert rescue.is_alive()
        rescue.cancel()
    short, endless = (text(SLEEP[world.kind].format(seconds)) for seconds in (0.1, 9))
    # Each answer counts, also if a transaction has many statements.
    world.store.database.transaction(lambda on: [on.execute(short) for _ in range(8)])
    with pytest.raises(StoreUnavailableError, match="has not answered"):
        list(world.store.database.stream(endless, 1))


def test_a_quick_loop_asks_a_silent_server_only_once(
    world: World, monkeypatch: MonkeyPatch
) -> None:
    """Its next turn tries again."""
    if world.kind == "sqlite":
        return  # it has no server
    monkeypatch.setattr("delaytasks.db.database.CHECK_S", 0.05)
    with (
        world.proxied() as (proxy, delays),
        ThreadPoolExecutor(1, initializer=limit_answers, initargs=(0.5,)) as loop,
    ):
        task = delays.schedule_delay("lost", 1, 60)
        delays.reschedule(task, 70)  # opens a connection of the other kind
        proxy.strand()
        with pytest.raises(OutcomeUnknownError, match=r"has not answered for 0\.5 s"):
            loop.submit(delays.cancel, task).result(30)
        assert loop.submit(delays.cancel, task).result(30)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["user", "database"])
def test_an_error_on_connecting_is_an_outage(database_url: str, tmp_path: Path, what: str) -> None:
    with (
        closing(delays_on(refused(database_url, what, tmp_path))) as delays,
        pytest.raises(StoreUnavailableError, match="cannot be reached") as raised,
    ):
        delays.find()
    assert not raised.value.is_unable
