"""A task that a call names by its id, by an earlier read, or by its tag and key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from delaytasks.core.errors import InvalidScheduleError, ShardMismatchError, TaskNotFoundError
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.interfaces import CallerConnection, Transaction
from delaytasks.core.task import DelayTask
from delaytasks.routing.shard import Shard

T = TypeVar("T")
#: A task that was read, an id, or a tag and a key.
TaskReference = DelayTask | int | tuple[str, str]


class NamedTask(NamedTuple):
    """The id of a task, the shards that may have it, and the transaction of the call."""

    id: int
    #: The shards that may have the task, the most likely one first.
    shards: Sequence[Shard]
    transaction: Transaction | None
    #: The shard of the caller's session; None without a session, and with one database.
    session_shard: int | None

    def read(self, work: Callable[[Shard, CallerConnection | None], T]) -> T:
        """Call `work` for one shard after the other until one has the task."""
        for shard in self.shards:
            try:
                return work(shard, self._connection(shard))
            except TaskNotFoundError:
                continue
        raise TaskNotFoundError(f"there is no task {self.id}", self.id)

    def move(self, work: Callable[[Shard, CallerConnection | None], T]) -> tuple[Shard, T]:
        """Call `work` like `read`, but with a session only for the shard of the session."""
        for shard in self.shards:
            if self.session_shard in (None, shard.number):
                try:
                    return shard, work(shard, self._connection(shard))
                except TaskNotFoundError:
                    continue
        if self.session_shard is not None:
            others = [shard for shard in self.shards if shard.number != self.session_shard]
            refuse_elsewhere(self.id, others, self.session_shard)
        raise TaskNotFoundError(f"there is no task {self.id}", self.id)

    def _connection(self, shard: Shard) -> CallerConnection | None:
        if self.transaction is None or self.session_shard not in (None, shard.number):
            return None
        return self.transaction.connection


def refuse_elsewhere(id: int, shards: Iterable[Shard], session_shard: int) -> None:
    """Raise `ShardMismatchError` if one of these shards has the task."""
    for shard in shards:
        if shard.store.tasks.get(id) is not None:
            raise ShardMismatchError(
                f"task {id} is in shard {shard.number}, and the session is on shard "
                f"{session_shard}; open a session on that database, or call without session="
            )


def name_of(task: object, tag: str | None, key: str | None) -> TaskReference:
    """Return the checked name that the arguments of a call give."""
    if (task is None) == (key is None) or (key is not None and tag is None):
        raise InvalidScheduleError("name the task by its id, or by tag= and key=")
    return (check_tag(tag), check_key(key)) if task is None else id_or_task(task)


def id_or_task(task: object) -> int | DelayTask:
    """Return `task` itself if it was read, else the id, checked."""
    return task if isinstance(task, DelayTask) else check_id(task)
