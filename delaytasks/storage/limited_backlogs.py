"""Holds overdue backlogs of limited tags, many rows in one step, so that keys take turns.

If one key has a long backlog, the rows of other keys are held before the rest of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Select, and_, bindparam, func, select, tuple_

from delaytasks.core.clock import monotonic
from delaytasks.core.states import MOVES
from delaytasks.storage.database import Database
from delaytasks.storage.rows import listed, listing
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, is_past

#: Rows that one step holds.
STEP = 1000
#: A key with more than this share of a step has a backlog.
BACKLOG_SHARE = 0.1
#: Rows of other keys are looked for at most once in `LOOK_S`, and at most for a twentieth of the
#: time, among the `LOOK_AMONG` oldest rows.
LOOK_S, LOOK_SHARE, LOOK_AMONG = 1.0, 20, 100_000


class LimitedBacklogs:
    """`hold` holds the rows with these ids, which its transaction has locked."""

    def __init__(
        self, database: Database, schema: Schema, hold: Callable[[Any, Collection[int]], None]
    ) -> None:
        self._db = database
        self._hold = hold
        self._lock = threading.Lock()
        #: For each queue and priority: tags and keys with a backlog, and when to look for others.
        self._backlogs: dict[tuple[str, int], set[tuple[str, str]]] = {}
        self._looks_at: dict[tuple[str, int], float] = {}
        t = schema.tasks
        tags: Any = listing("tags")
        backlogs: Any = bindparam("backlogs", expanding=True)
        level = (t.c.queue == bindparam("queue"), t.c.priority == bindparam("priority"))
        is_due = and_(
            t.c.status == int(MOVES["hold"].source), *level, is_past(t.c.expected_time, db_now())
        )
        key = func.coalesce(t.c.concurrency_key, "").label("lane")
        due = select(t.c.id, t.c.tag, key).where(is_due)
        oldest = due.order_by(t.c.expected_time).limit(LOOK_AMONG).subquery()
        others = and_(oldest.c.tag.in_(tags), tuple_(oldest.c.tag, oldest.c.lane).not_in(backlogs))
        self._others = select(oldest.c.id).where(others).limit(STEP)
        due = due.with_for_update(skip_locked=True)
        self._due = due.where(t.c.tag.in_(tags)).order_by(t.c.expected_time).limit(STEP)
        self._named = due.where(listed(database, t.c.id, "ids")).order_by(t.c.id)

    def hold_overdue(self, queue: str, priority: int, tags: Collection[str]) -> bool:
        """Hold one step of the overdue rows of these tags; return True if there may be more."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread does it
        try:
            level, where = (queue, priority), {"queue": queue, "priority": priority}
            known = self._backlogs.setdefault(level, set())
            backlogs = {of for of in known if of[0] in tags}
            is_look = bool(backlogs) and monotonic() >= self._looks_at.get(level, 0)
            if is_look:
                held = self._hold_others(level, backlogs, {**where, "tags": sorted(tags)})
            else:
                held = self._hold_step(self._due, {**where, "tags": sorted(tags)})
            known |= {of for of, count in Counter(held).items() if count > BACKLOG_SHARE * STEP}
            return is_look or len(held) == STEP
        finally:
            self._lock.release()

    def _hold_others(
        self, level: tuple[str, int], backlogs: set[tuple[str, str]], where: dict[str, Any]
    ) -> list[tuple[str, str]]:
        """Hold rows of the keys that have no backlog."""
        began = monotonic()
        query = {**where, "backlogs": sorted(backlogs)}
        ids = self._db.alone(lambda c: c.execute(self._others, query).scalars().all())
        held = self._hold_step(self._named, {**where, "ids": sorted(ids)}) if ids else []
        if len(held) < STEP:  # all others are held, or other transactions have locked them
            self._backlogs[level] -= backlogs
            self._looks_at[level] = monotonic() + max(LOOK_S, LOOK_SHARE * (monotonic() - began))
        return held

    def _hold_step(self, query: Select[Any], where: dict[str, Any]) -> list[tuple[str, str]]:
        """Return the tag and the key of each row that was held."""

        def work() -> list[tuple[str, str]]:
            with self._db.begin() as connection:
                found = connection.execute(query, where).all()
                self._hold(connection, [row.id for row in found])
                return [(row.tag, row.lane) for row in found]

        return self._db.run(work)
