"""Deadlocks, serialization failures and lock timeouts: the number of retries, and the final
error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError

from delaytasks import Status
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.storage.driver_errors import TRIES
from delaytasks.storage.store import Store
from tests.conftest import open_store
from tests.recording import counted
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

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


def task(store: Store, id: int) -> DelayTask:
    now = store.tasks.now()
    return DelayTask(id, "mail", "{}", now, create_time=now)


def test_a_transaction_with_conflicts_is_tried_five_times(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: least)
    store = table.store
    claims = store.claims("w", None)
    claimed: list[DelayTask] = []
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
