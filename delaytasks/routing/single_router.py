"""The shard router of a deployment with one database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from delaytasks.core.durations import Delay
from delaytasks.core.errors import InvalidScheduleError, TaskNotFoundError
from delaytasks.core.filters import Filter
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.interfaces import Transaction, connection_of
from delaytasks.core.page import Page
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.text import shown
from delaytasks.routing.named_task import NamedTask, TaskReference
from delaytasks.routing.shard import Shard


class SingleRouter:
    """Sends every call to the only database."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._store = shard.store
        self.shards: Sequence[Shard] = [shard]
        self.stores = [shard.store]
        # `router.schedule(...)` is `Producer.schedule(...)` itself, so that no frame lies between.
        self.schedule = shard.producer.schedule
        self.schedule_many = shard.producer.schedule_many

    def each(self, work: Callable[[Shard], object]) -> list[Shard]:
        """Call `work` for the shard; no shard is left unanswered."""
        work(self._shard)
        return []

    def shard_for(self, tag: str, key: str) -> Shard:
        check_tag(tag)
        check_key(key)
        return self._shard

    def new_id(self, tag: str | None, key: str | None) -> int:
        if (tag is None) != (key is None):
            raise InvalidScheduleError("new_id() takes a tag and a key, or neither")
        if tag is not None and key is not None:
            self.shard_for(tag, key)
        return self._shard.new_id()

    def named(self, name: TaskReference, transaction: Transaction | None) -> NamedTask:
        """Return the task that a call names; look a key up."""
        if isinstance(name, tuple):
            tag, key = name
            self._check_number(transaction)
            id = self._store.tasks.id_of_key(tag, key, connection_of(transaction))
            if id is None:
                raise TaskNotFoundError(
                    f"no live task of tag {shown(tag)} has the key {shown(key)}"
                )
        else:
            id = id_of(name)
        return NamedTask(id, self.shards, transaction, None)

    def find(
        self,
        where: Filter,
        cursor: str | None,
        limit: int,
        transaction: Transaction | None,
        newest_first: bool,
        time_limit_s: float | None = None,
    ) -> Page:
        return self._store.tasks.find(
            where, limit, cursor, connection_of(transaction), newest_first, time_limit_s
        )

    def touch(
        self, name: TaskReference, delay: Delay | None, transaction: Transaction | None
    ) -> bool:
        due, on = self._shard.producer.due_of(delay), connection_of(transaction)
        if isinstance(name, tuple):
            self._check_number(transaction)
            return self._store.touches.touch_key(*name, due, on)
        return self._store.touches.touch(id_of(name), due, on)

    def touch_many(
        self,
        names: Iterable[int | DelayTask],
        delay: Delay | None,
        transaction: Transaction | None,
    ) -> set[int]:
        """Return the ids of the tasks that still wait."""
        due = self._shard.producer.due_of(delay)
        return self._store.touches.touch_many(map(id_of, names), due, connection_of(transaction))

    def touch_keys(
        self,
        tag: str,
        keys: Sequence[str],
        delay: Delay | None,
        transaction: Transaction | None,
    ) -> set[str]:
        """Return the keys whose tasks still wait."""
        self._check_number(transaction)
        ids = self._store.touches.ids_of_keys(tag, keys, connection_of(transaction))
        touched = self.touch_many(ids.values(), delay, transaction)
        return {key for key, id in ids.items() if id in touched}

    def _check_number(self, transaction: Transaction | None) -> None:
        """Raise `ConfigError` if the database is one of several shards: it lacks some keys."""
        if transaction is None:  # a caller's transaction may need no connection of our own
            self._store.check_number_once()

    def session_shard(self, transaction: Transaction | None) -> int | None:
        """Return None: there is nothing to choose."""
        return None

    def check_shard(self, task: DelayTask, transaction: Transaction | None) -> None:
        """Do nothing: a session is on the only database."""
