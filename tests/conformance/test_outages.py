"""Conflicts, refused logins and servers that cannot write."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select, text, update
from sqlalchemy.exc import DBAPIError

from delaytasks import DelayedTask, OutcomeUnknownError, Status, StoreUnavailableError
from delaytasks.db.types import db_now_plus
from delaytasks.loops import limit_answers
from delaytasks.operate.health import HealthChecks, verdict_of
from delaytasks.operate.state import DeploymentState
from tests.conftest import new_world
from tests.waiting import wait_until
from tests.world import MonkeyPatch, Settlement, World
from tests.world.recording import delays_on, set_columns

# Deadlocks, serialization failures and lock timeouts: the number of retries, and the final
# error


PREFIX = "conflict_"
TRIES = 5
#: Raise a conflict in place of each change of a row while a sequence, which no rollback changes, is
#: below 0. On MariaDB, the tests after this one meet a deadlock and a lock timeout.
CONFLICTS = """
CREATE SEQUENCE {0} MINVALUE -1000 START 0;
CREATE FUNCTION {0}() RETURNS trigger AS $$ BEGIN
    IF nextval('{0}') < 0 THEN RAISE EXCEPTION 'as asked' USING ERRCODE = '{1}'; END IF;
    RETURN NEW; END $$ LANGUAGE plpgsql;
CREATE TRIGGER {0} BEFORE INSERT OR UPDATE ON {2} FOR EACH ROW EXECUTE FUNCTION {0}();
"""


def ask(world: World, statement: str) -> int:
    with world.begin() as connection:
        found = connection.exec_driver_sql(statement.format(f"{PREFIX}numbers"))
        return int(found.scalar_one()) if found.returns_rows else 0


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


#: Serialization failure, deadlock and lock timeout.
@pytest.fixture(params=["40001", "40P01", "55P03"])
def conflicting(request: pytest.FixtureRequest, postgresql_url: str) -> Iterator[tuple[World, str]]:
    with new_world(World, postgresql_url, table_prefix=PREFIX) as world:
        ask(world, CONFLICTS.format("{0}", request.param, world.table().name))
        yield world, request.param
        ask(world, "DROP FUNCTION {0} CASCADE; DROP SEQUENCE {0}")


@pytest.mark.slow
def test_a_transaction_with_conflicts_is_tried_five_times(
    conflicting: tuple[World, str], tries: list[float]
) -> None:
    """A chunk is settled row by row instead, if a row stays locked."""
    (world, code), claimed = conflicting, list[DelayedTask]()

    def tries_of(name: str) -> int:
        return 1 if (name, code) == ("settle", "55P03") else TRIES

    verbs: dict[str, Callable[[], Any]] = {
        "schedule": lambda: world.delays.schedule_delay("note", None, 0, key="k"),
        "schedule many": lambda: world.delays.schedule_many([("note", None, 0)] * 3),
        "claim": lambda: claimed.extend(world.claim_due(most=3)),
        "settle": lambda: world.settle(claimed.pop()),
        "reschedule": lambda: world.delays.reschedule(world.delays.find(status=0).tasks[0], 0),
    }
    for name, verb in verbs.items():
        ask(world, f"SELECT setval('{{0}}', {-tries_of(name)})")
        verb()
        assert ask(world, "SELECT last_value FROM {0}") >= 0, name
    counted = world.counted()
    assert (counted[Status.DONE], counted[Status.RUNNING]) == (1, 2)
    assert sorted(one.key or "" for one in claimed) == ["", "k"]
    for name in ("claim", "settle", "settle", "schedule many"):
        ask(world, "SELECT setval('{0}', -100)")
        with pytest.raises(StoreUnavailableError, match="stayed busy"):
            verbs[name]()
        assert ask(world, "SELECT last_value FROM {0}") == tries_of(name) - 100, name
    assert world.counted() == counted


@pytest.mark.slow
def test_a_deadlock_with_another_program_is_retried_until_it_succeeds(own: World) -> None:
    """The other transaction locks the two rows in reverse order, and the database chooses the
    victim. A runner settles row by row what stays locked."""
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
        refusal = settling.exception(10)
        if refusal is None:
            accepted = settling.result()
        else:
            assert isinstance(refusal, StoreUnavailableError)
            assert refusal.is_locked
            accepted = set().union(*(own.worker().settle([end]) for end in ends))
        assert accepted == {task.id for task in tasks}
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
    refused = pytest.raises(StoreUnavailableError, match="stayed busy")
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
            later = own.now() + timedelta(seconds=600)
            near = run.submit(own.store.sweeps.first_due_between, own.now(), later, 10)
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
    "sweep": lambda w, task: w.sweep(),
    "claim": lambda w, task: w.claim_due(),
}


@pytest.mark.slow
def test_after_a_demotion_the_next_call_reaches_the_new_primary(own: World) -> None:
    tasks = [own.schedule() for _ in CALLS]
    for task, (name, call) in zip(tasks, CALLS.items(), strict=True):
        own.demote(READ_ONLY[own.kind])
        assert call(own, task), name


# A server that answers but refuses writes


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
        verdict = verdict_of(DeploymentState(world.runtime))
        assert (verdict.level, verdict.headline) == ("bad", "Stopped. The database is read-only.")
        world.reconnect()
        assert api.ready()[0].is_ok


# A database that refuses logins counts as unavailable, like a server that does not answer


SLEEP = {"postgresql": "SELECT pg_sleep({})", "mysql": "SELECT SLEEP({})"}


def test_a_call_whose_server_falls_silent_ends(world: World, monkeypatch: MonkeyPatch) -> None:
    """A frozen server, as this proxy, still acknowledges what it receives."""
    if world.kind == "sqlite":
        return  # it has no server
    monkeypatch.setattr("delaytasks.db.database.CHECK_S", 0.05)
    with (
        world.proxied() as (proxy, delays),
        ThreadPoolExecutor(1, initializer=limit_answers, initargs=(0.5,)) as loop,
    ):
        task = delays.schedule_delay("lost", 1, 60)
        delays.reschedule(task, 70)  # opens a connection of the other kind
        rescue = threading.Timer(20, proxy.reset)
        rescue.start()
        proxy.strand()
        with pytest.raises(OutcomeUnknownError, match=r"has not answered for 0\.5 s"):
            loop.submit(delays.cancel, task).result(30)  # a quick loop asks only once
        assert loop.submit(delays.reschedule, task, 80).result(30), "the next turn tries again"
        monkeypatch.setattr("delaytasks.db.database.RETRY_FOR_S", 0.05)
        monkeypatch.setattr("delaytasks.db.database.ANSWER_LIMIT_S", 0.5)
        proxy.strand()
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


NOBODY = {"username": "nobody_of_this_name", "password": "wrong"}
NOWHERE = {"database": "no_database_of_this_name"}


@pytest.mark.slow
@pytest.mark.parametrize("changed", [NOBODY, NOWHERE], ids=["user", "database"])
def test_an_error_on_connecting_is_an_outage(
    database_url: str, tmp_path: Path, changed: dict[str, str]
) -> None:
    url = make_url(database_url).set(**changed).render_as_string(hide_password=False)
    if database_url.startswith("sqlite"):
        url = f"sqlite:///{tmp_path}"  # the path is a folder, not a file
    refused = pytest.raises(StoreUnavailableError, match="cannot be reached")
    with closing(delays_on(url)) as delays, refused as raised:
        delays.find()
    assert not raised.value.is_unable
