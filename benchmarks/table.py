"""The rows of the benchmark: made, looked at and dropped. The only SQL of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, exists, func, select, text
from sqlalchemy.exc import DBAPIError

from benchmarks.ours import delays
from benchmarks.waiting import BenchError
from benchmarks.where import TABLE_PREFIX
from delaytasks.core.states import Status
from delaytasks.store import migrations
from delaytasks.store.failures import translate
from delaytasks.store.types import db_now

_database = delays.store.database
_t = delays.store.schema.tasks
_LIVE = _t.c.status.in_([int(Status.NOT_COMPLETE), int(Status.RUNNING)])


def make() -> None:
    drop()
    migrations.upgrade(_database, TABLE_PREFIX)


@contextmanager
def alone() -> Iterator[None]:
    """Two runs on one database would empty each other's tables and queues: the second one is refused."""
    locks = {"postgresql": "SELECT pg_try_advisory_lock(hashtext(:name))", "mysql": "SELECT GET_LOCK(:name, 0)"}
    query = locks.get(_database.url.get_backend_name().replace("mariadb", "mysql"))
    try:
        connection = _database.auto.connect()  # the lock is this connection's, and ends with it
    except DBAPIError as error:
        raise BenchError(f"{translate(error)}: set DELAYTASKS_BENCH_DATABASE_URL") from error
    try:
        if query is not None and not connection.execute(text(query), {"name": "delaytasks " + TABLE_PREFIX}).scalar():
            raise BenchError("another run uses this database: wait for it, or set DELAYTASKS_BENCH_DATABASE_URL")
        yield
    finally:
        connection.invalidate()
        connection.close()


def drop() -> None:
    def work(connection: Connection) -> None:
        delays.store.schema.metadata.drop_all(connection)
        connection.execute(text(f"DROP TABLE IF EXISTS {migrations.version_table(TABLE_PREFIX)}"))

    _database.alone(work)


def clear() -> None:
    """Empty, with empty statistics: the hardest case for the planner."""
    names = ", ".join(table.name for table in (_t, delays.store.schema.keys))
    _alone(text(f"TRUNCATE {names}") if _database.can.copy else _t.delete())


def count(status: Status | None = None) -> int:
    query = select(func.count()).select_from(_t)
    return int(_scalar(query if status is None else query.where(_t.c.status == int(status))))


def has_unfinished_due() -> bool:
    """Whether a task that is due has not ended: one look into an index."""
    return bool(_scalar(select(exists().where(_LIVE, _t.c.expected_time <= db_now()))))


def last_settled_at() -> float:
    finished = _t.c.status == int(Status.DONE)
    return float(_scalar(select(func.max(_t.c.update_time)).where(finished)).timestamp())


def lateness_ms() -> list[float]:
    query = select(_t.c.execution_time, _t.c.expected_time).where(_t.c.status == int(Status.DONE))
    rows = _database.alone(lambda c: c.execute(query).all())
    return [(began - due).total_seconds() * 1000 for began, due in rows]


def repeated() -> int:
    """Rows that ran more than once."""
    return int(_scalar(select(func.count()).select_from(_t).where(_t.c.attempts > 1)))


def server_version() -> str:
    return str(_scalar(text("SELECT version()"))).partition(" (")[0]


def _scalar(query: Any) -> Any:
    return _database.alone(lambda c: c.execute(query).scalar_one())


def _alone(statement: Any) -> None:
    _database.alone(lambda c: c.execute(statement))
