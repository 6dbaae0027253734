"""Follows the changes of tasks, for `delaytasks tail`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from delaytasks.core.filters import Filter
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.changes import LATELY_S, ChangeReader
from delaytasks.storage.store import Store

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


class Follower:
    """Reads the changes of the tasks that match a filter."""

    def __init__(self, store: Store, where: Filter) -> None:
        self._store = store
        self._where = where
        self._changes: ChangeReader | None = None
        self._read_at: datetime | None = None
        #: The last version of each task, the last change last.
        self._known: OrderedDict[int, int] = OrderedDict()
        self._live: OrderedDict[int, None] = OrderedDict()

    def read(self) -> FollowStep:
        """Return the changes since the last read. The first one returns those of the last minute.

        Raises
        ------
        StoreError
            If the database does not answer.
        """
        store = self._store
        if self._changes is None:
            self._changes = ChangeReader(store.database, store.schema, self._where)
        now = self._changes.now()
        back_s = LATELY_S if self._read_at is None else OVERLAP_S
        since = (self._read_at or now) - timedelta(seconds=back_s)
        found = self._changes.read(since, now, self._live)
        self._read_at = now
        new = [task for task in found.tasks if self._is_new(task)]
        return FollowStep(sorted(new, key=changed_at), found.is_incomplete)

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
        return wanted is None or Status(task.status) in wanted


def changed_at(task: DelayTask) -> datetime:
    return task.update_time or task.create_time or task.expected_time
