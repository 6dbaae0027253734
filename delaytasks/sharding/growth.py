"""The keys that remain in the old homes after a shard was added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from delaytasks.core.batches import batches
from delaytasks.core.ids import home_of, shard_of
from delaytasks.core.states import FINISHED
from delaytasks.sharding.databases import Shards
from delaytasks.storage.store import Store
from delaytasks.storage.task_keys import KeyRow

COMPARED_IDS = 1000


class KeysToMove(NamedTuple):
    """Keys in the table of one shard."""

    #: Keys of live tasks in this shard that their new homes do not know.
    unknown: list[KeyRow]
    #: Keys without a live task: it is finished, or its producer died before scheduling it.
    dead: list[KeyRow]


class Growth:
    """Tells new homes the live tasks that stay where they are. Then no process has to ask old
    homes."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._shards = Shards(stores, None)
        self._count = len(stores)

    def left(self, number: int) -> KeysToMove:
        """Return the keys that remain to be moved or freed."""
        left = KeysToMove([], [])
        for batch in batches(self._shards.store(number).tasks.key_owners.rows(), COMPARED_IDS):
            left.dead.extend(
                row for row in batch if row.status is None and self._is_dead(row, number)
            )
            moved = [
                row
                for row in batch
                if row.status not in (None, *FINISHED) and self._home(row) != number
            ]
            left.unknown.extend(self._unknown(moved, number))
        return left

    def finish(self, number: int) -> KeysToMove:
        """Tell the homes, free the dead keys, and return what was done."""
        left, key_owners = self.left(number), self._shards.store(number).tasks.key_owners
        for row in left.dead:
            key_owners.drop(row, partial(self._is_dead, row, number))
        for row in left.unknown:
            task = self._shards.store(number).tasks.get(row.id)
            if task is not None:
                with key_owners.pointing(task) as is_held:
                    if is_held:
                        self._shards.store(self._home(row)).tasks.key_owners.point(task, "reject")
        return left

    def _unknown(self, moved: Sequence[KeyRow], number: int) -> Iterator[KeyRow]:
        def home_and_tag(row: KeyRow) -> tuple[int, str]:
            return self._home(row), row.tag

        for (home, tag), some in groupby(sorted(moved, key=home_and_tag), home_and_tag):
            rows = list(some)
            known = self._shards.store(home).touches.ids_of_keys(tag, [row.key for row in rows])
            yield from (
                row for row in rows if row.key not in known or shard_of(known[row.key]) != number
            )

    def _is_dead(self, row: KeyRow, number: int) -> bool:
        """Whether a key of this shard, whose task is not here, has no live task."""
        pointed = shard_of(row.id)
        if pointed == number:
            return True  # it was purged
        if pointed >= self._count:
            return False  # this process does not know that shard
        return self._shards.store(pointed).tasks.key_owners.live(row) is None

    def _home(self, row: KeyRow) -> int:
        return home_of(row.tag, row.key, self._count)
