"""Leases of running rows: renewed while the worker's process lives, released when it is dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, or_, select, update

from delaytasks.core.interfaces import Recovered
from delaytasks.core.states import Status
from delaytasks.storage.abandoned_rows import AbandonedRows
from delaytasks.storage.database import Database
from delaytasks.storage.row_lists import by_index
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_table import hot_index
from delaytasks.storage.types import db_now_plus, is_rare, unindexed


class Renewed(NamedTuple):
    #: The number of rows whose leases were renewed.
    rows: int
    #: The ids of rows that other transactions have locked. While a row is locked, no other worker
    #: can recover it.
    skipped: Sequence[int] = ()


class Leases:
    def __init__(self, database: Database, schema: Schema, lease_s: float) -> None:
        self._db = database
        self._t = schema.tasks
        self._abandoned = AbandonedRows(database, schema)
        self._lease_s = lease_s

    def renew(
        self, workers: Sequence[str], claimed_since: datetime, named: Sequence[int] = ()
    ) -> Renewed:
        """Renew the leases of rows that these processes have claimed since `claimed_since`, and of
        the `named` rows.

        Rows that they claimed before that were lost on the way. No process runs them, so their
        leases must end. A row that another transaction has locked is skipped, so that the other
        rows do not wait for it.
        """
        t = self._t
        is_recent = t.c.update_time >= claimed_since
        is_current = or_(is_recent, t.c.id.in_(named)) if named else is_recent
        leased = and_(self._leased_by(workers), is_current)
        pick = by_index(select(t.c.id).where(leased), t, hot_index(t)).order_by(unindexed(t.c.id))
        lock = pick.with_for_update(skip_locked=True)

        def work(connection: Any) -> Renewed:
            wanted = connection.execute(pick).scalars().all()
            ids = set(connection.execute(lock).scalars()) if wanted else set()
            skipped = [id for id in wanted if id not in ids]
            if not ids:
                return Renewed(0, skipped)
            renewal = update(t).where(t.c.id.in_(sorted(ids)))
            renewal = renewal.values(lease_until=db_now_plus(self._lease_s))
            return Renewed(connection.execute(renewal).rowcount, skipped)

        return self._db.transaction(work)

    def release(
        self,
        workers: Sequence[str],
        max_lost_leases: int,
        time_limits: Mapping[str, float] | None = None,
    ) -> Recovered:
        """Recover the rows of dead processes immediately, not only when their leases end."""
        return self._abandoned.recover(
            self._leased_by(workers), max_lost_leases, time_limits=time_limits
        )

    def _leased_by(self, workers: Sequence[str]) -> ColumnElement[Any]:
        runs = is_rare(self._t.c.status == int(Status.RUNNING))
        return and_(runs, self._t.c.worker.in_(list(workers)))
