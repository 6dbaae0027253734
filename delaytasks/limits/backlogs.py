"""Holds overdue backlogs of limited tags, many rows in one step, so that keys take turns.

If one key has a long backlog, the rows of other keys are held before the rest of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.limits.queries import BacklogQueries
from delaytasks.storage.database import Database
from delaytasks.storage.schema import Schema

#: Rows that one step holds.
HOLD_ROWS = 1000
#: A key with more than this share of a step has a backlog.
BACKLOG_SHARE = 0.1
#: Rows of other keys are looked for at most once in `OTHER_KEYS_REST_S`, and at most for a 20th of
#: the time, among the oldest rows.
OTHER_KEYS_REST_S, OTHER_KEYS_SHARE = 1.0, 20


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
        self._queries = BacklogQueries(database, schema)

    def hold_overdue(self, queue: str, priority: int, tags: Collection[str]) -> bool:
        """Hold one step of the overdue rows of these tags; return True if there may be more."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread does it
        try:
            level = queue, priority
            where = {"queue": queue, "priority": priority, "tags": sorted(tags), "most": HOLD_ROWS}
            known = self._backlogs.setdefault(level, set())
            backlogs = {of for of in known if of[0] in tags}
            is_look = bool(backlogs) and monotonic() >= self._looks_at.get(level, 0)
            if is_look:
                held = self._hold_others(level, backlogs, where)
            else:
                held = self._hold_step(partial(self._queries.due, where=where))
            known |= {
                of for of, count in Counter(held).items() if count > BACKLOG_SHARE * HOLD_ROWS
            }
            return is_look or len(held) == HOLD_ROWS
        finally:
            self._lock.release()

    def _hold_others(
        self, level: tuple[str, int], backlogs: set[tuple[str, str]], where: dict[str, Any]
    ) -> list[tuple[str, str]]:
        """Hold rows of the keys that have no backlog."""
        began = monotonic()
        ids = self._db.autocommitted(lambda c: self._queries.others(c, where, backlogs))
        held = self._hold_step(partial(self._queries.named, where=where, ids=ids)) if ids else []
        if len(held) < HOLD_ROWS:  # all others are held, or other transactions have locked them
            self._backlogs[level] -= backlogs
            self._looks_at[level] = monotonic() + max(
                OTHER_KEYS_REST_S, OTHER_KEYS_SHARE * (monotonic() - began)
            )
        return held

    def _hold_step(self, lock: Callable[[Any], Sequence[Any]]) -> list[tuple[str, str]]:
        """Return the tag and the key of each row that was held."""

        def work(connection: Any) -> list[tuple[str, str]]:
            found = lock(connection)
            self._hold(connection, [row.id for row in found])
            return [(row.tag, row.concurrency_key) for row in found]

        return self._db.transaction(work)
