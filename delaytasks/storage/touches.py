"""Timeouts pushed away: later only, and no new version. A message for the old time arrives, and the row is not due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Select, bindparam, case, select, update

from delaytasks.core.errors import TaskNotFoundError
from delaytasks.core.interfaces import Executor
from delaytasks.core.states import MOVES
from delaytasks.core.text import shown
from delaytasks.storage.database import Database
from delaytasks.storage.rows import listed
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys
from delaytasks.storage.types import UTCDateTime, db_now

T = TypeVar("T")
Name = TypeVar("Name", int, str)
#: Rows in one transaction, so that their locks are short.
BATCH_ROWS = 2000


class Touches:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._keys = TaskKeys(database, schema)
        t, k, due = schema.tasks, schema.keys, bindparam("due", type_=UTCDateTime())
        # `+ 0` keeps planners from reading all rows that wait.
        waits = (t.c.status + 0).in_([int(s) for s in MOVES["reschedule"].sources])
        later = case((t.c.expected_time < due, due), else_=t.c.expected_time)
        # Of a deferred task, whose next try may be later than its new due time. MySQL assigns from left to right, so
        # due_time comes first, and sees the old expected_time.
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

    def touch(self, id: int, due: datetime, on: Executor | None = None) -> bool:
        """False if it does not wait any more."""

        def work(connection: Any) -> bool:
            if connection.execute(self._touch, {"task_id": id, "due": due}).rowcount:
                return True
            if connection.execute(self._exists, {"task_id": id}).first() is None:
                raise TaskNotFoundError(f"there is no task {id}", id)
            return False

        return self._alone(work, on)

    def touch_key(self, tag: str, key: str, due: datetime, on: Executor | None = None) -> bool:
        """As `touch`, in one statement too."""

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

        return self._alone(work, on)

    def touch_many(self, ids: Iterable[int], due: datetime, on: Executor | None = None) -> set[int]:
        """Those of them that wait."""
        wanted = set(ids)
        if on is not None:
            return {
                id
                for batch in _lots(wanted)
                for id in self._touch_batch(on, self._lock, batch, due)
            }
        # What somebody has locked comes last, so that no other timeout has to wait for it.
        touched: set[int] = set()
        for lock in (self._lock_free, self._lock):
            for batch in _lots(wanted - touched):
                touched.update(self._db.run(partial(self._touch_batch_alone, lock, batch, due)))
        return touched

    def _touch_batch_alone(self, lock: Select[Any], ids: list[int], due: datetime) -> list[int]:
        with self._db.begin() as connection:
            return self._touch_batch(connection, lock, ids, due)

    def _touch_batch(self, on: Any, lock: Select[Any], ids: list[int], due: datetime) -> list[int]:
        """In the order of ids, as everybody locks rows: else two could deadlock."""
        waiting: list[int] = on.execute(lock, {"ids": ids}).scalars().all()
        if waiting:
            on.execute(self._touch_listed, {"ids": waiting, "due": due})
        return waiting

    def ids_of_keys(
        self, tag: str, keys: Iterable[str], on: Executor | None = None
    ) -> dict[str, int]:
        """By key, of those that a live task has."""
        wanted, found = set(keys), dict[str, int]()
        for batch in _lots(wanted):
            found.update(self._alone(partial(self._keys.ids_of, tag=tag, keys=batch), on))
        if on is not None and self._db.can.reads_as_of_start:
            # As when one key is looked up (`Tasks.id_of_key`): other tasks may have taken keys since the caller's
            # transaction began.
            for key, id in sorted(self.ids_of_keys(tag, wanted).items()):
                if found.setdefault(key, id) == id:
                    continue
                now = self._keys.id_of(on, tag, key, is_locked=True)
                if now is not None:
                    found[key] = now
        return found

    def _alone(self, work: Callable[[Any], T], on: Executor | None) -> T:
        return work(on) if on is not None else self._db.alone(work)


def _lots(items: Iterable[Name]) -> Iterator[list[Name]]:
    ordered = sorted(items)
    for start in range(0, len(ordered), BATCH_ROWS):
        yield ordered[start : start + BATCH_ROWS]
