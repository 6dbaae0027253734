"""Crowds of limited tags get in line, many at once, and with them those who would wait behind a crowd for that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Select, and_, bindparam, func, select, tuple_

from delaytasks.core.clock import monotonic
from delaytasks.core.states import Status
from delaytasks.storage.database import Database
from delaytasks.storage.rows import listed, listing
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, is_past

#: Rows that get in line together.
STEP = 1000
#: A lane with more than this share of a step is a crowd.
CROWD = 0.1
#: Others are looked for behind crowds as often as this, though it is to take a twentieth of the time at most; and among
#: so many rows.
LOOK_S, LOOK_SHARE, LOOK_AMONG = 1.0, 20, 100_000


class LimitedBacklogs:
    def __init__(
        self, database: Database, schema: Schema, line_up: Callable[[Any, Collection[int]], None]
    ) -> None:
        self._db = database
        self._line_up = line_up
        self._gathers = threading.Lock()
        #: By queue and priority: lanes, with their tags, that others wait behind; and when somebody should look there.
        self._lanes: dict[tuple[str, int], set[tuple[str, str]]] = {}
        self._looks_at: dict[tuple[str, int], float] = {}
        t = schema.tasks
        tags: Any = listing("tags")
        crowd: Any = bindparam("crowd", expanding=True)
        level = (t.c.queue == bindparam("queue"), t.c.priority == bindparam("priority"))
        is_due = and_(
            t.c.status == int(Status.NOT_COMPLETE), *level, is_past(t.c.expected_time, db_now())
        )
        lane = func.coalesce(t.c.concurrency_key, "").label("lane")
        due = select(t.c.id, t.c.tag, lane).where(is_due)
        oldest = due.order_by(t.c.expected_time).limit(LOOK_AMONG).subquery()
        others = and_(oldest.c.tag.in_(tags), tuple_(oldest.c.tag, oldest.c.lane).not_in(crowd))
        self._behind = select(oldest.c.id).where(others).limit(STEP)
        due = due.with_for_update(skip_locked=True)
        self._due = due.where(t.c.tag.in_(tags)).order_by(t.c.expected_time).limit(STEP)
        self._named = due.where(listed(database, t.c.id, "ids")).order_by(t.c.id)

    def gather(self, queue: str, priority: int, tags: Collection[str]) -> bool:
        """True if there may be more of them."""
        if not self._gathers.acquire(blocking=False):
            return False  # another thread does it
        try:
            level, where = (queue, priority), {"queue": queue, "priority": priority}
            known = self._lanes.setdefault(level, set())
            crowd = {lane for lane in known if lane[0] in tags}
            is_look = bool(crowd) and monotonic() >= self._looks_at.get(level, 0)
            if is_look:
                lanes = self._look_behind(level, crowd, {**where, "tags": sorted(tags)})
            else:
                lanes = self._step(self._due, {**where, "tags": sorted(tags)})
            known |= {lane for lane, count in Counter(lanes).items() if count > CROWD * STEP}
            return is_look or len(lanes) == STEP
        finally:
            self._gathers.release()

    def _look_behind(
        self, level: tuple[str, int], crowd: set[tuple[str, str]], where: dict[str, Any]
    ) -> list[tuple[str, str]]:
        began = monotonic()
        query = {**where, "crowd": sorted(crowd)}
        ids = self._db.alone(lambda c: c.execute(self._behind, query).scalars().all())
        lanes = self._step(self._named, {**where, "ids": sorted(ids)}) if ids else []
        if len(lanes) < STEP:  # all others are in line, or somebody has them
            self._lanes[level] -= crowd
            self._looks_at[level] = monotonic() + max(LOOK_S, LOOK_SHARE * (monotonic() - began))
        return lanes

    def _step(self, query: Select[Any], where: dict[str, Any]) -> list[tuple[str, str]]:
        """The lanes of those that got in line."""

        def work() -> list[tuple[str, str]]:
            with self._db.begin() as connection:
                found = connection.execute(query, where).all()
                self._line_up(connection, [row.id for row in found])
                return [(row.tag, row.lane) for row in found]

        return self._db.run(work)
