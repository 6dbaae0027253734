"""Touch: moves a timeout to a later due time without a new version.

A message for the old time still arrives, and finds that the row is not due.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import Select, bindparam, case, select, update

from delaytasks.core.errors import TaskNotFoundError
from delaytasks.core.filters import batches
from delaytasks.core.interfaces import CallerConnection
from delaytasks.core.states import MOVES
from delaytasks.core.text import shown
from delaytasks.storage.database import Database
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.row_lists import listed
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys
from delaytasks.storage.types import UTCDateTime, db_now, unindexed

#: Rows in one transaction, so that their locks are short.
TOUCH_BATCH_ROWS = 2000


class Touches:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._keys = TaskKeys(database, schema)
        t, k, due = schema.tasks, schema.keys, bindparam("due", type_=UTCDateTime())
        waits = unindexed(t.c.status).in_([int(s) for s in MOVES["reschedule"].sources])
        later = case((t.c.expected_time < due, due), else_=t.c.expected_time)
        # The next try of a deferred task may be later than its new due time. MySQL assigns from
        # left to right, so due_time comes first and uses the old expected_time.
        later_due = case(
            (t.c.expected_time < due, None), (t.c.due_time < due, due), else_=t.c.due_time
        )
        touch = update(t).ordered_values(
            (t.c.due_time, later_due), (t.c.expected_time, later), (t.c.update_time, db_now())
        )
        of_key = select(k.c.task_id).where(
            k.c.tag == bindparam("of_tag"), k.c.task_key == bindparam("of_key")
        )
        named = listed(database, t.c.id, "ids")
        self._touch = touch.where(t.c.id == bindparam("task_id"), waits)
        self._touch_key = touch.where(t.c.id == of_key.scalar_subquery(), waits)
        self._touch_listed = touch.where(named)
        self._exists = select(t.c.id).where(t.c.id == bindparam("task_id"))
        waiting = select(t.c.id).where(named, waits).order_by(t.c.id)
        self._lock = waiting.with_for_update()
        self._lock_free = waiting.with_for_update(skip_locked=True)

    def touch(self, id: int, due: datetime, on: CallerConnection | None = None) -> bool:
        """Move one timeout. Returns False if the task no longer waits."""

        def work(connection: Any) -> bool:
            if connection.execute(self._touch, {"task_id": id, "due": due}).rowcount:
                return True
            if connection.execute(self._exists, {"task_id": id}).first() is None:
                raise TaskNotFoundError(f"there is no task {id}", id)
            return False

        return self._db.autocommitted(work, on)

    def touch_key(
        self, tag: str, key: str, due: datetime, on: CallerConnection | None = None
    ) -> bool:
        """Do the same by key, in one statement."""

        def work(connection: Any) -> bool:
            if connection.execute(
                self._touch_key, {"of_tag": tag, "of_key": key, "due": due}
            ).rowcount:
                return True
            if self._keys.id_of(connection, tag, key) is None:
                raise TaskNotFoundError(
                    f"no live task of tag {shown(tag)} has the key {shown(key)}"
                )
            return False

        return self._db.autocommitted(work, on)

    def touch_many(
        self, ids: Iterable[int], due: datetime, on: CallerConnection | None = None
    ) -> set[int]:
        """Move many timeouts. Returns the ids of the tasks that still wait."""
        wanted, touched = set(ids), set[int]()
        if on is not None:
            for batch in batches(sorted(wanted), TOUCH_BATCH_ROWS):
                touched.update(self._touch_batch(on, self._lock, batch, due))
            return touched
        # Rows that another transaction has locked come last, so that no other timeout waits for
        # them.
        for lock in (self._lock_free, self._lock):
            for batch in batches(sorted(wanted - touched), TOUCH_BATCH_ROWS):
                work = partial(self._touch_batch, lock=lock, ids=batch, due=due)
                touched.update(self._db.transaction(work))
        return touched

    def _touch_batch(self, on: Any, lock: Select[Any], ids: list[int], due: datetime) -> list[int]:
        """Touch in the order of ids, in which every transaction locks rows. Else two could
        deadlock."""
        waiting: list[int] = on.execute(lock, {"ids": ids}).scalars().all()
        if waiting:
            changed = on.execute(self._touch_listed, {"ids": waiting, "due": due}).rowcount
            check_row_count(changed, len(waiting), "tasks to touch")
        return waiting

    def ids_of_keys(
        self, tag: str, keys: Iterable[str], on: CallerConnection | None = None
    ) -> dict[str, int]:
        """Return the ids of live tasks by their keys."""
        wanted, found = set(keys), dict[str, int]()
        for batch in batches(sorted(wanted), TOUCH_BATCH_ROWS):
            found.update(
                self._db.autocommitted(partial(self._keys.ids_of, tag=tag, keys=batch), on)
            )
        if on is not None and self._db.can.reads_as_of_start:
            # Other tasks may have taken keys since the caller's transaction began (see
            # `Tasks.id_of_key`).
            for key, id in sorted(self.ids_of_keys(tag, wanted).items()):
                if found.setdefault(key, id) == id:
                    continue
                now = self._keys.id_of(on, tag, key, is_locked=True)
                if now is not None:
                    found[key] = now
        return found
