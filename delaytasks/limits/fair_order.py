"""The fair order of a waitlist: keys take turns, and each starts by priority and due time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from delaytasks.core.task import DelayTask
from delaytasks.limits.capacity import Capacity
from delaytasks.limits.queries import WaitlistQueries

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
    """Admits rows of a waitlist, whose column `concurrency_key` holds the concurrency key."""

    def __init__(self, queries: WaitlistQueries, admit: Admit) -> None:
        self._queries = queries
        self._admit = admit

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
            is_new = True
            while is_new:
                rows = self._queries.first(on, where, after, 1 + EXTRA_ENTRIES)
                is_new = False
                for key, entries in groupby(rows, attrgetter("concurrency_key")):
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
            most = quota + EXTRA_ENTRIES
            while entries := self._queries.first_of_key(on, where, key, most):
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
        while len(keys) < most:
            key = self._queries.next_key(on, where, turn)
            if key is None and turn is not None:
                key = self._queries.next_key(on, where, None)
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
        later = [entry for entry in entries if entry.is_later]
        # Rows that are no longer due are left to the sweep.
        released = self._queries.release(on, [entry.task_id for entry in later])
        stale += [entry for entry in later if entry.task_id in released]
        ready = [entry for entry in entries if not entry.is_gone and not entry.is_later]
        is_alone = bool(ready) and ready[0].lapses > 0 and may_be_alone
        ready = ready[:1] if is_alone else [entry for entry in ready if not entry.lapses]
        admitted: list[DelayTask] = []
        while ready and len(admitted) < quota:
            wanted = quota - len(admitted)
            some, ready = ready[:wanted], ready[wanted:]
            admitted += self._admit(on, [(entry.task_id, entry.version) for entry in some])
        ids = {task.id for task in admitted}
        done = stale + [entry for entry in entries if entry.task_id in ids]
        self._queries.remove(on, where, done)
        return _Removed(admitted, len(stale), is_alone and bool(admitted))
