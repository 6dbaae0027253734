"""Leases of rows that run: renewed while their process lives, released when it is dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select, update

from delaytasks.core.interfaces import Lapsed
from delaytasks.core.states import Status
from delaytasks.storage.abandoned_rows import AbandonedRows
from delaytasks.storage.database import Database
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now_plus


class Leases:
    def __init__(self, database: Database, schema: Schema, lease_s: float) -> None:
        self._db = database
        self._t = schema.tasks
        self._lapses = AbandonedRows(database, schema)
        self._lease_s = lease_s

    def renew(self, workers: Sequence[str], since: datetime, named: Sequence[int] = ()) -> int:
        """Begins the leases anew of what these processes claimed since then, and of the rows that are named. What
        they claimed before and still hold was lost on the way: nobody runs it, so its lease must end. Returns how
        many were renewed."""
        t = self._t
        meant = (
            or_(t.c.update_time >= since, t.c.id.in_(named)) if named else t.c.update_time >= since
        )
        held = and_(self._held(workers), meant)
        # A row that some caller's open transaction has locked is passed over: its neighbours must not wait with it.
        # `+ 0` keeps planners from walking the whole primary key.
        pick = select(t.c.id).where(held).order_by(t.c.id + 0).with_for_update(skip_locked=True)

        def work() -> int:
            with self._db.begin() as connection:
                ids = connection.execute(pick).scalars().all()
                if ids:
                    renewed = (
                        update(t)
                        .where(t.c.id.in_(ids))
                        .values(lease_until=db_now_plus(self._lease_s))
                    )
                    connection.execute(renewed)
                return len(ids)

        return self._db.run(work)

    def release(
        self,
        workers: Sequence[str],
        max_lost_leases: int,
        time_limits: Mapping[str, float] | None = None,
    ) -> Lapsed:
        """These processes are dead: what they held lapses at once, instead of when the lease ends."""
        return self._lapses.lapse(self._held(workers), max_lost_leases, time_limits=time_limits)

    def _held(self, workers: Sequence[str]) -> ColumnElement[Any]:
        return and_(self._t.c.status == int(Status.RUNNING), self._t.c.worker.in_(list(workers)))
