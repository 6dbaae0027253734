"""Failed attempts, one row each. A task that succeeds at its first attempt has no row here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import bindparam, delete, insert, select

from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import Attempt
from delaytasks.storage.database import Database
from delaytasks.storage.inserts import skipping_insert
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now

#: The last attempts of each task are kept.
KEPT_ATTEMPTS = 50


class Attempts:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._a = a = schema.attempts
        made = skipping_insert(database)
        # A settlement whose answer was lost is sent again, and then its attempt exists already.
        row = made(a).on_conflict_do_nothing() if made else insert(a).prefix_with("IGNORE")
        self._add = row.values(ended=db_now())
        versions = select(a.c.version).where(a.c.task_id == bindparam("of"))
        # MySQL reads a table that the statement changes only in a derived table.
        first_old = versions.order_by(a.c.version.desc()).offset(KEPT_ATTEMPTS).limit(1).subquery()
        self._drop_old = delete(a).where(
            a.c.task_id == bindparam("of"), a.c.version <= select(first_old).scalar_subquery()
        )

    def record(self, on: Any, failed: Sequence[Settlement], worker: str) -> None:
        rows = [
            (s.task.id, s.task.version, s.task.attempts, s.began, worker, s.error) for s in failed
        ]
        self._write(on, rows)

    def record_lost_leases(self, on: Any, rows: Iterable[Any], error: str) -> None:
        """Write the runs that lost their lease; `rows` are rows of the task table."""
        runs = [
            (row.id, row.version, row.attempts, row.execution_time, row.worker, error)
            for row in rows
        ]
        self._write(on, runs)

    def _write(self, on: Any, attempts: Sequence[tuple[Any, ...]]) -> None:
        names = ("task_id", "version", "attempt", "began", "worker", "error")
        rows = [dict(zip(names, values, strict=True)) for values in attempts]
        on.execute(self._add, rows)
        old = [{"of": row["task_id"]} for row in rows if row["attempt"] > KEPT_ATTEMPTS]
        if old:
            on.execute(self._drop_old, old)

    def of(self, on: Any, id: int) -> list[Attempt]:
        a = self._a
        columns = (a.c.attempt, a.c.began, a.c.ended, a.c.worker, a.c.error)
        return [
            Attempt(*row)
            for row in on.execute(select(*columns).where(a.c.task_id == id).order_by(a.c.version))
        ]

    def forget(self, on: Any, ids: Sequence[int]) -> None:
        on.execute(delete(self._a).where(self._a.c.task_id.in_(ids)))
