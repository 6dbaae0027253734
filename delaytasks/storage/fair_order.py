"""The fair order of a waitlist: keys take turns, and each starts by priority and due time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, delete, select, tuple_, update

from delaytasks.core.capacity import Capacity
from delaytasks.core.states import MOVES
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.rows import listed, listing, next_version
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now

#: Entries that are read beyond those that may start, since other transactions may have locked the
#: first ones.
EXTRA_ENTRIES = 20
#: Admits those of the ids and versions of held rows that no other transaction has locked.
Admit = Callable[[Any, Sequence[tuple[int, int]]], list[DelayTask]]


class Admitted(NamedTuple):
    tasks: list[DelayTask]
    #: The key of the last one, after which the next turn goes on.
    turn: str | None


class _Removed(NamedTuple):
    """The result of removing entries from a waitlist."""

    tasks: list[DelayTask]
    #: The number of entries whose row no longer waits here.
    stale: int
    #: The only task is a recovered one, which runs alone because it may kill its worker.
    is_alone: bool


class FairOrder:
    """Admits rows of a waitlist, whose column `lane` holds the concurrency key."""

    def __init__(self, database: Database, schema: Schema, admit: Admit) -> None:
        self._admit = admit
        t, entry, held = schema.tasks, schema.lines, int(MOVES["admit"].source)
        position = (entry.c.lane, entry.c.place, entry.c.due, entry.c.task_id, entry.c.version)
        named = listed(database, t.c.id, "ids")
        released = {
            "status": int(MOVES["release"].target),
            "version": next_version(t.c.version),
            "update_time": db_now(),
        }
        self._release = update(t).values(released).where(named)
        # A locked row is skipped: its transaction may postpone it further.
        free = select(t.c.id).where(named, t.c.status + 0 == held).with_for_update(skip_locked=True)
        self._lock_held = free
        # `+ 0` keeps planners from looking for one row among all that are held.
        waits = and_(
            t.c.id == entry.c.task_id, t.c.version == entry.c.version, t.c.status + 0 == held
        )
        in_waitlist = and_(entry.c.queue == bindparam("queue"), entry.c.tag == bindparam("tag"))
        is_gone = t.c.id.is_(None).label("is_gone")
        is_later = (t.c.expected_time > db_now()).label("is_later")
        first = (
            select(*position, is_gone, is_later, t.c.lapses)
            .select_from(entry.outerjoin(t, waits))
            .where(in_waitlist)
            .order_by(entry.c.lane, entry.c.place, entry.c.due, entry.c.task_id)
            .limit(bindparam("most"))
        )
        self._first = first.where(entry.c.lane == bindparam("lane"))
        self._delete = delete(entry).where(in_waitlist, tuple_(*position).in_(listing("places")))
        keys = select(entry.c.lane).where(in_waitlist).order_by(entry.c.lane).limit(1)
        # The keys: whether there was a turn before, and whether some keys have reached their limit.
        after, not_full = entry.c.lane > bindparam("after"), entry.c.lane.not_in(listing("full"))
        conditions: dict[tuple[bool, bool], list[Any]] = {
            (False, False): [],
            (False, True): [not_full],
            (True, False): [after],
            (True, True): [after, not_full],
        }
        self._next_key = {which: keys.where(*some) for which, some in conditions.items()}
        self._first_of_next = {which: first.where(*some) for which, some in conditions.items()}

    def admit(
        self, on: Any, queue: str, tag: str, share: int, capacity: Capacity, turn: str | None
    ) -> Admitted:
        """Take the next `share` rows off the waitlist; `turn` is the key of the last row before."""
        if share <= 0:
            return Admitted([], turn)
        where = {"queue": queue, "tag": tag, "full": capacity.full_keys}
        if share == 1:
            return self._admit_one(on, where, turn)
        return self._admit_several(on, where, share, capacity, turn)

    def _admit_one(self, on: Any, where: dict[str, Any], turn: str | None) -> Admitted:
        """Take the first row of the key after `turn`."""
        for after in (None,) if turn is None else (turn, None):
            query = self._first_of_next[after is not None, bool(where["full"])]
            is_new = True
            while is_new:
                rows = on.execute(query, {**where, "after": after, "most": 1 + EXTRA_ENTRIES}).all()
                is_new = False
                for key, entries in groupby(rows, attrgetter("lane")):
                    removed = self._remove(on, where, list(entries), 1, True)
                    if removed.tasks:
                        return Admitted(removed.tasks, key)
                    is_new = is_new or removed.stale > 0
        return Admitted([], turn)

    def _admit_several(
        self,
        on: Any,
        where: dict[str, Any],
        share: int,
        capacity: Capacity,
        turn: str | None,
    ) -> Admitted:
        """Take the same number of rows of each key, from the key after `turn` on."""
        admitted: list[DelayTask] = []
        keys = self._keys(on, where, share, turn)
        for number, key in enumerate(keys):
            quota = -(-(share - len(admitted)) // (len(keys) - number))
            quota = min(quota, capacity.for_key(key))
            first = {**where, "lane": key, "most": quota + EXTRA_ENTRIES}
            while entries := on.execute(self._first, first).all():
                removed = self._remove(on, where, entries, quota, not admitted)
                admitted += removed.tasks
                if removed.is_alone:
                    return Admitted(admitted, key)
                if removed.tasks or not removed.stale:
                    break
            turn = key
        return Admitted(admitted, turn)

    def _keys(self, on: Any, where: dict[str, Any], most: int, turn: str | None) -> list[str]:
        """Return at most `most` keys whose turn is next."""
        keys: list[str] = []

        def next_key(after: str | None) -> str | None:
            query = self._next_key[after is not None, bool(where["full"])]
            found: str | None = on.execute(query, {**where, "after": after}).scalar()
            return found

        while len(keys) < most:
            key = next_key(turn)
            if key is None and turn is not None:
                key = next_key(None)
            if key is None or key in keys:
                break
            keys.append(key)
            turn = key
        return keys

    def _remove(
        self, on: Any, where: dict[str, Any], entries: Sequence[Any], quota: int, may_be_alone: bool
    ) -> _Removed:
        """Admit at most `quota` of these entries, and remove their entries and the stale ones."""
        stale = [entry for entry in entries if entry.is_gone]
        stale += self._release_postponed(on, [entry for entry in entries if entry.is_later])
        ready = [entry for entry in entries if not entry.is_gone and not entry.is_later]
        is_alone = bool(ready) and ready[0].lapses > 0 and may_be_alone
        ready = ready[:1] if is_alone else [entry for entry in ready if not entry.lapses]
        admitted: list[DelayTask] = []
        while ready and len(admitted) < quota:
            wanted = quota - len(admitted)
            some, ready = ready[:wanted], ready[wanted:]
            admitted += self._admit(on, [(entry.task_id, entry.version) for entry in some])
        ids = {task.id for task in admitted}
        if done := stale + [entry for entry in entries if entry.task_id in ids]:
            # No check of the row count: another transaction may have removed a stale entry.
            on.execute(self._delete, {**where, "places": [tuple(entry[:5]) for entry in done]})
        return _Removed(admitted, len(stale), is_alone and bool(admitted))

    def _release_postponed(self, on: Any, entries: list[Any]) -> list[Any]:
        """Release rows that are no longer due, for the sweep, and return their entries."""
        if not entries:
            return []
        ids = {"ids": [entry.task_id for entry in entries]}
        locked = set(on.execute(self._lock_held, ids).scalars())
        if locked:
            released = on.execute(self._release, {"ids": sorted(locked)})
            check_row_count(released.rowcount, len(locked), "rows to release from a waitlist")
        return [entry for entry in entries if entry.task_id in locked]
