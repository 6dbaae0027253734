"""The rows of the benchmarks: create, read and delete them.

This module contains the only SQL of the benchmarks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, create_engine, exists, func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, registry

from benchmarks.ours import TAG, delays
from benchmarks.settings import TABLE_PREFIX
from benchmarks.waiting import BenchError
from delaytasks import DelayTasks
from delaytasks.db import migrations
from delaytasks.db.database import Database
from delaytasks.db.engines import translate
from delaytasks.db.statements import NEW_COLUMNS
from delaytasks.db.store import Store
from delaytasks.db.types import db_now
from delaytasks.model.errors import StoreError
from delaytasks.model.moves import Status
from delaytasks.recurring.creation import RecurringTable
from delaytasks.recurring.definition import Definition
from delaytasks.runtime import runtime_of
from delaytasks.settings import load_settings

T = TypeVar("T")
#: Rows per statement: many, but few enough that an interrupt takes effect soon.
FILL_STEP = 500_000

_database = runtime_of(delays).store.database
_t = runtime_of(delays).store.schema.tasks
_LIVE = _t.c.status.in_([int(Status.NOT_COMPLETE), int(Status.RUNNING), int(Status.HELD)])


def _run(work: Callable[[Connection], T]) -> T:
    """Run statements that may take minutes. `autocommitted` ends a step after 30 s."""
    return _database.repeat(work, _database.auto.connect)


def make() -> None:
    drop()
    migrations.upgrade(_database, TABLE_PREFIX)


@contextmanager
def alone() -> Iterator[None]:
    """Refuse a second run on the same database.

    Two runs would delete each other's rows and messages.
    """
    locks = {
        "postgresql": "SELECT pg_try_advisory_lock(hashtext(:name))",
        "mysql": "SELECT GET_LOCK(:name, 0)",
    }
    query = locks.get(backend())
    try:
        # the lock belongs to this connection and ends with it
        connection = _database.auto.connect()
    except DBAPIError as error:
        raise BenchError(f"{translate(error)}: set DELAYTASKS_BENCH_DATABASE_URL") from error
    try:
        if (
            query is not None
            and not connection.execute(text(query), {"name": "delaytasks " + TABLE_PREFIX}).scalar()
        ):
            raise BenchError(
                "another run uses this database: wait for it, or set DELAYTASKS_BENCH_DATABASE_URL"
            )
        yield
    finally:
        connection.invalidate()
        connection.close()


@contextmanager
def other_tables(prefix: str) -> Iterator[Store]:
    """Yield a store with other tables in the same database."""
    url = _database.url.render_as_string(hide_password=False)
    store = Store(url, load_settings({}, {}, database_url=url, table_prefix=prefix))
    try:
        _run(store.schema.metadata.drop_all)
        _run(store.schema.metadata.create_all)
        yield store
    finally:
        _run(store.schema.metadata.drop_all)
        store.close()


class Own:
    """A mapped class for the caller's rows; the ORM adds its constructor."""


@contextmanager
def session() -> Iterator[Session]:
    """Yield a session of the caller on the caller's own engine."""
    engine = create_engine(_database.url)
    try:
        with Session(engine) as caller:
            yield caller
    finally:
        engine.dispose()


@contextmanager
def own_inserts() -> Iterator[tuple[Session, dict[str, Callable[[], object]]]]:
    """Yield a caller's session and its own INSERTs.

    They insert rows like those of delaytasks into an equal table.
    """
    columns = [_t.c[name] for name in NEW_COLUMNS if name != "id"]
    row = dict(
        _run(lambda connection: connection.execute(select(*columns).limit(1)).one())._mapping
    )
    ids = itertools.count(1)
    with other_tables(TABLE_PREFIX + "own_") as store, session() as caller:
        statement = insert(store.schema.tasks)
        mapped = registry()
        make: Any = mapped.map_imperatively(Own, store.schema.tasks).class_

        def by_orm() -> None:
            caller.add(make(**row, id=next(ids)))
            caller.flush()

        yield (
            caller,
            {
                "Core": lambda: caller.execute(statement, {**row, "id": next(ids)}),
                "the ORM": by_orm,
            },
        )
        mapped.dispose()


def drop() -> None:
    def work(connection: Connection) -> None:
        runtime_of(delays).store.schema.metadata.drop_all(connection)
        connection.execute(text(f"DROP TABLE IF EXISTS {migrations.version_table(TABLE_PREFIX)}"))

    _run(work)


def clear() -> None:
    """Delete all rows and reset the statistics, the hardest case for the planner."""
    schema = runtime_of(delays).store.schema
    tables = (_t, schema.keys, schema.waitlists, schema.recurring)
    if _database.can.copy:
        _execute(text(f"TRUNCATE {', '.join(table.name for table in tables)}"))
    else:
        for table in tables:
            _execute(table.delete())


def fill(
    rows: int,
    status: Status,
    soonest_s: float,
    latest_s: float,
    is_keyed: bool = False,
    in_order: bool = False,
) -> None:
    """Add `rows` rows that are due between two times, in seconds from now; PostgreSQL only.

    The due times are random, or ascend with the ids, as if each task had the same delay. The ids
    are those of a producer that creates one per millisecond, and leases last longer than any
    benchmark. If requested, one row in ten has a key.
    """
    key = "CASE WHEN n % 10 = 0 THEN 'order-' || last || '-' || n END" if is_keyed else "NULL"
    began = "NULL" if status is Status.NOT_COMPLETE else "due"
    lease = "due + interval '30 days'" if status is Status.RUNNING else "NULL"
    place = "(:start + n)::float / :all" if in_order else "random()"
    statement = text(f"""
        INSERT INTO {_t.name} (id, tag, message_body, status, version, delay_time, expected_time,
                               execution_time, create_time, update_time, lease_until, worker,
                               task_key)
        SELECT (last >> 22) + n << 22 | n % 131072, '{TAG}',
               '{{"due": 0.5, "order": ' || n || '}}', {status:d}, 1, 3600, due, {began},
               due - interval '1 hour', coalesce({began}, now()), {lease}, 'w', {key}
        FROM (SELECT coalesce(max(id), 0) AS last FROM {_t.name}) before,
             (SELECT n, now() + (:soonest + {place} * :spread) * interval '1 second' AS due
              FROM generate_series(1, :rows) n) made""").bindparams(
        soonest=soonest_s, spread=latest_s - soonest_s
    )
    for start in range(0, rows, FILL_STEP):
        where = {"start": start, "all": rows} if in_order else {}
        _execute(statement.bindparams(rows=min(FILL_STEP, rows - start), **where))


@contextmanager
def indexed_at_the_end() -> Iterator[None]:
    """Create the indexes after the rows.

    If an index is larger than the cache, random due times are inserted at a few thousand rows per
    second. Sorting them once takes minutes instead of hours.
    """

    def drop(connection: Connection) -> None:
        for index in _t.indexes:
            index.drop(connection)

    def create(connection: Connection) -> None:
        connection.execute(text("SET maintenance_work_mem = '1GB'"))
        for index in _t.indexes:
            index.create(connection)
        connection.execute(text("RESET maintenance_work_mem"))

    _run(drop)
    try:
        yield
    finally:
        _run(create)


def take_keys() -> str:
    """Give each waiting task its key as owner, and return one of the keys."""
    keys = runtime_of(delays).store.schema.keys
    waits = _t.c.status == int(Status.NOT_COMPLETE)
    _execute(
        keys.insert().from_select(
            ["tag", "task_key", "task_id"],
            select(_t.c.tag, _t.c.task_key, _t.c.id).where(waits, _t.c.task_key.is_not(None)),
        )
    )
    settle_down(keys.name)
    return str(_scalar(select(keys.c.task_key).limit(1)))


def settle_down(name: str = _t.name) -> None:
    """Do the work of autovacuum and the checkpointer now.

    Otherwise it would begin in the middle of a measurement.
    """
    _execute(text(f"VACUUM (ANALYZE) {name}"))
    try:
        _execute(text("CHECKPOINT"))
    except StoreError:
        pass  # only a superuser may run a checkpoint


def fill_recurring(made: DelayTasks, timings: Iterable[tuple[str, str]]) -> None:
    """Store a recurring schedule for each cron expression and time zone."""
    runtime = runtime_of(made)
    store, now = runtime.store, runtime.clock.certain_now()
    table = RecurringTable(store.database, store.schema)
    rows: list[dict[str, Any]] = []
    for number, (cron, tz) in enumerate(timings):
        new = Definition(f"r{number}", TAG, {"due": 0}, cron, {"tz": tz}).checked(runtime)
        next_at = new.parsed().after(now)
        stored = replace(new, id=number, next_at=next_at, create_time=now, update_time=now)
        rows.append(table.values(stored))
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.recurring), rows)


def forget_sweeps() -> None:
    _execute(runtime_of(delays).store.schema.sweeps.delete())


def forget_policies() -> None:
    _execute(runtime_of(delays).store.schema.policies.delete())


def backend() -> str:
    return _database.url.get_backend_name().replace("mariadb", "mysql")


def can_fill() -> bool:
    return backend() == "postgresql"


def sizes() -> list[tuple[str, int]]:
    """Return the sizes of the table and of each index in bytes; PostgreSQL only."""
    query = text("""
        SELECT relname, pg_relation_size(oid) FROM pg_class
        WHERE oid = to_regclass(:name)
           OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = to_regclass(:name))
        ORDER BY relkind DESC, relname""")
    return [tuple(row) for row in _run(lambda c: c.execute(query, {"name": _t.name}).all())]


def count(status: Status | None = None) -> int:
    query = select(func.count()).select_from(_t)
    return int(_scalar(query if status is None else query.where(_t.c.status == int(status))))


def has_unfinished_due() -> bool:
    """Return whether a due task is unfinished, by one index lookup."""
    return bool(_scalar(select(exists().where(_LIVE, _t.c.expected_time <= db_now()))))


def last_settled_at() -> float:
    finished = _t.c.status == int(Status.DONE)
    return float(_scalar(select(func.max(_t.c.update_time)).where(finished)).timestamp())


def lateness_ms() -> list[float]:
    query = select(_t.c.execution_time, _t.c.expected_time).where(_t.c.status == int(Status.DONE))
    rows = _run(lambda c: c.execute(query).all())
    return [(began - due).total_seconds() * 1000 for began, due in rows]


def runs() -> dict[str, tuple[datetime, datetime]]:
    """Return when each finished task with a key was due, and when it began."""
    query = select(_t.c.task_key, _t.c.expected_time, _t.c.execution_time).where(
        _t.c.status == int(Status.DONE)
    )
    return {key: (due, began) for key, due, began in _run(lambda c: c.execute(query).all())}


def active_s() -> float | None:
    """Return the time spent in statements of all clients; PostgreSQL 14 or newer only."""
    if backend() != "postgresql":
        return None
    query = "SELECT active_time / 1000 FROM pg_stat_database WHERE datname = current_database()"
    return float(_scalar(text(query)))


def wal_bytes() -> int:
    """Return the size of the server's write-ahead log for all databases; PostgreSQL only."""
    return int(_scalar(text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")))


def repeated() -> int:
    """Return the number of rows that ran more than once."""
    return int(_scalar(select(func.count()).select_from(_t).where(_t.c.runs > 1)))


class PrivateDatabase(NamedTuple):
    """A database for this run only; PostgreSQL only."""

    url: str
    name: str

    def transactions(self) -> int:
        """Return the number of transactions so far. The server counts them up to a second late."""
        query = text(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = :name"
        )
        return int(_scalar(query.bindparams(name=self.name)))


@contextmanager
def private() -> Iterator[PrivateDatabase]:
    """Create a database with tables, and drop it at the end."""
    name = f"{TABLE_PREFIX}{os.getpid()}"
    _execute(text(f"CREATE DATABASE {name}"))
    try:
        url = _database.url.set(database=name).render_as_string(hide_password=False)
        fresh = Database(url)
        migrations.upgrade(fresh, TABLE_PREFIX)
        fresh.autocommitted(
            lambda c: c.execute(text("VACUUM ANALYZE"))
        )  # otherwise autovacuum would run during the measurement
        fresh.dispose()
        yield PrivateDatabase(url, name)
    finally:
        _execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def server_version() -> str:
    if backend() == "sqlite":
        return f"SQLite {_scalar(text('SELECT sqlite_version()'))}"
    return str(_scalar(text("SELECT version()"))).partition(" (")[0]


def _scalar(query: Any) -> Any:
    return _run(lambda c: c.execute(query).scalar_one())


def _execute(statement: Any) -> None:
    _run(lambda c: c.execute(statement))
