"""Crowds of limited tags get in line, many at once, and with them those who would wait behind a crowd for that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sqlalchemy import Row, Select, and_, bindparam, func, select

from delaytasks.core.clock import monotonic
from delaytasks.core.states import Status
from delaytasks.store.database import Database
from delaytasks.store.rows import listed, listing
from delaytasks.store.schema import Schema
from delaytasks.store.types import db_now, is_past

#: Rows that get in line together.
STEP = 1000
#: Others are looked for behind a crowd as often as this, and among so many rows.
LOOK_S, LOOK_AMONG = 1.0, 100_000


class Crowds:
    def __init__(self, database: Database, schema: Schema, line_up: Callable[[Any, Collection[int]], None]) -> None:
        self._db = database
        self._line_up = line_up
        self._gathers = threading.Lock()
        #: By queue and priority: lanes that others wait behind, and when somebody looked behind them last.
        self._lanes: dict[tuple[str, int], set[str]] = {}
        self._looked_at: dict[tuple[str, int], float] = {}
        t = schema.tasks
        waits, tags = t.c.status == int(Status.NOT_COMPLETE), listing("tags")
        due = (
            select(t.c.id, t.c.tag, func.coalesce(t.c.concurrency_key, "").label("lane"))
            .where(waits, t.c.queue == bindparam("queue"))
            .where(t.c.priority == bindparam("priority"), is_past(t.c.expected_time, db_now()))
            .order_by(t.c.expected_time)
        )
        self._due = due.where(t.c.tag.in_(tags)).limit(STEP).with_for_update(skip_locked=True)
        oldest = due.limit(LOOK_AMONG).subquery()
        others = and_(oldest.c.tag.in_(tags), oldest.c.lane.not_in(listing("crowd")))
        self._behind: Select[Any] = select(oldest).where(others).limit(STEP)
        named = listed(database, t.c.id, "ids")
        self._lock = select(t.c.id).where(named, waits).order_by(t.c.id).with_for_update(skip_locked=True)

    def gather(self, queue: str, priority: int, tags: Collection[str]) -> bool:
        """True if there may be more of them."""
        if not self._gathers.acquire(blocking=False):
            return False  # another thread does it
        try:
            where, level = {"queue": queue, "priority": priority, "tags": sorted(tags)}, (queue, priority)
            crowd = self._lanes.get(level)
            if crowd and monotonic() > self._looked_at.get(level, float("-inf")) + LOOK_S:
                found = self._step(self._behind, {**where, "crowd": sorted(crowd)})
                if len(found) < STEP:
                    self._looked_at[level] = monotonic()
                    del self._lanes[level]
            else:
                found = self._step(self._due, where)
                crowd = None
            lanes = Counter(row.lane for row in found)
            self._lanes.setdefault(level, set()).update(lane for lane, count in lanes.items() if 2 * count > STEP)
            return crowd is not None or len(found) == STEP
        finally:
            self._gathers.release()

    def _step(self, query: Select[Any], where: dict[str, Any]) -> Sequence[Row[Any]]:
        def work() -> Sequence[Row[Any]]:
            with self._db.begin() as connection:
                found = connection.execute(query, where).all()
                ids = [row.id for row in found]
                if query is self._behind and ids:
                    ids = list(connection.execute(self._lock, {"ids": ids}).scalars())
                self._line_up(connection, ids)
                return found

        return self._db.run(work)
