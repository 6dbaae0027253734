"""Follows the changes of tasks, for `delaytasks tail`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from delaytasks.core.errors import StoreError
from delaytasks.core.filters import Filter
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.routing.shard import Shard
from delaytasks.storage.changes import LATELY_S, ChangeReader

#: Versions that are remembered, to show each change once.
MOST_KNOWN = 20_000
#: Live tasks of which each read asks again, the last ones that changed.
MOST_SEEN = 500
#: A read looks back further than the last one, since transactions may be open for some time.
OVERLAP_S = 10.0


class FollowStep(NamedTuple):
    """The changes that one read has found, the oldest first."""

    tasks: Sequence[DelayTask]
    #: Whether there may be changes that the read has not found, because there are very many.
    is_incomplete: bool
    #: The errors of the shards that did not answer, by their numbers.
    down: dict[int, str]


class Follower:
    """Reads the changes of the tasks that match a filter, in all databases."""

    def __init__(self, shards: Sequence[Shard], where: Filter) -> None:
        self._followers = {shard.number: _ShardFollower(shard, where) for shard in shards}
        self._has_read = False

    def read(self) -> FollowStep:
        """Return the changes since the last read. The first one returns those of the last minute.

        Raises
        ------
        StoreError
            If no database has ever answered.
        """
        tasks: list[DelayTask] = []
        is_incomplete, down = False, dict[int, str]()
        for number, follower in self._followers.items():
            try:
                found, is_part = follower.read()
            except StoreError as error:
                down[number] = str(error)
                if len(down) == len(self._followers) and not self._has_read:
                    raise
                continue
            self._has_read = True
            tasks += found
            is_incomplete |= is_part
        return FollowStep(sorted(tasks, key=changed_at), is_incomplete, down)


class _ShardFollower:
    def __init__(self, shard: Shard, where: Filter) -> None:
        self._shard = shard
        self._where = where
        self._changes: ChangeReader | None = None
        self._read_at: datetime | None = None
        #: The last version of each task, the last change last.
        self._known: OrderedDict[int, int] = OrderedDict()
        self._live: OrderedDict[int, None] = OrderedDict()

    def read(self) -> tuple[Sequence[DelayTask], bool]:
        store = self._shard.store
        if self._changes is None:
            self._changes = ChangeReader(store.database, store.schema, self._where)
        now = self._changes.now()
        back_s = LATELY_S if self._read_at is None else OVERLAP_S
        since = (self._read_at or now) - timedelta(seconds=back_s)
        found = self._changes.read(since, now, self._live)
        self._read_at = now
        return [task for task in found.tasks if self._is_new(task)], found.is_incomplete

    def _is_new(self, task: DelayTask) -> bool:
        """Remember the version of a task. Return whether its change is to be shown."""
        if self._known.get(task.id) == task.version:
            return False
        self._known[task.id] = task.version
        self._known.move_to_end(task.id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        self._live.pop(task.id, None)
        if not task.is_finished:
            self._live[task.id] = None
            if len(self._live) > MOST_SEEN:
                self._live.popitem(last=False)
        wanted = self._where.status
        return wanted is None or Status.of(task.status) in wanted


def changed_at(task: DelayTask) -> datetime:
    return task.update_time or task.create_time or task.expected_time
