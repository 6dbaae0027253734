"""The shard router of a deployment with several databases.

A key has a home shard, an id contains the number of its shard, and a session is on one shard.
Every other task goes to any shard that can be reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Thread

from delaytasks.core.clock import monotonic
from delaytasks.core.durations import Delay
from delaytasks.core.errors import (
    InvalidScheduleError,
    StoreUnavailableError,
    TaskNotFoundError,
)
from delaytasks.core.filters import Filter
from delaytasks.core.interfaces import CallerConnection, OnConflict, Transaction, connection_of
from delaytasks.core.new_task import NewTask
from delaytasks.core.page import Page
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.text import shown
from delaytasks.routing.named_task import NamedTask, TaskReference, refuse_elsewhere
from delaytasks.routing.shard import EACH_SHARD_S, Shard
from delaytasks.routing.single_router import SingleRouter
from delaytasks.scheduling.producer import BULK, OnBatch
from delaytasks.scheduling.task_builder import RowBatch
from delaytasks.sharding.databases import Shards
from delaytasks.sharding.selection import ShardSelection


class ShardRouter:
    """Sends each call to the shard that it is for. Has the methods of `SingleRouter`."""

    def __init__(
        self, shards: Sequence[Shard], databases: Shards, selection: ShardSelection
    ) -> None:
        self.shards = shards
        self.databases = databases
        self.stores = databases.stores
        self._selection = selection

    def each(self, work: Callable[[Shard], object]) -> list[Shard]:
        """Call `work` for every shard, concurrently.

        Return the shards that have not answered within `EACH_SHARD_S`; their calls go on, but no
        caller waits for them.
        """
        errors: list[Exception] = []

        def call(shard: Shard) -> None:
            try:
                work(shard)
            except Exception as error:
                errors.append(error)

        threads = [
            Thread(target=call, args=(shard,), name="delaytasks-each", daemon=True)
            for shard in self.shards
        ]
        for thread in threads:
            thread.start()
        ends = monotonic() + EACH_SHARD_S
        for thread in threads:
            thread.join(max(ends - monotonic(), 0))
        if errors:
            raise errors[0]
        return [
            shard for shard, thread in zip(self.shards, threads, strict=True) if thread.is_alive()
        ]

    # -- schedule ---------------------------------------------------------------------------------

    def schedule(
        self, new: NewTask, on_conflict: OnConflict, transaction: Transaction | None
    ) -> DelayTask:
        return self._selection.run(
            self._selection.of(new, self.session_shard(transaction)),
            lambda number: self.shards[number].producer.schedule(new, on_conflict, transaction),
        )

    def schedule_many(
        self,
        tasks: Iterable[NewTask],
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: OnBatch | None,
    ) -> int:
        total, source, session_shard = 0, iter(tasks), self.session_shard(transaction)
        while batch := list(itertools.islice(source, BULK)):
            by_shards: dict[tuple[int, ...], list[NewTask]] = {}
            any_shard = self._selection.any()
            for new in batch:
                numbers = self._selection.of(new, session_shard, any_shard)
                by_shards.setdefault(numbers, []).append(new)
            # All tasks are checked before one of them is written.
            built = [
                (numbers, part, self._build(numbers, part, on_conflict))
                for numbers, part in by_shards.items()
            ]
            for numbers, part, rows in built:
                write = partial(self._write, part, rows, on_conflict, transaction, on_batch)
                total += self._selection.run(numbers, write)
        return total

    def _build(
        self, numbers: Sequence[int], part: Sequence[NewTask], on_conflict: OnConflict
    ) -> RowBatch:
        return self._selection.run(
            numbers, lambda number: self.shards[number].producer.make_batch(part, on_conflict)
        )

    def _write(
        self,
        part: Sequence[NewTask],
        rows: RowBatch,
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: OnBatch | None,
        number: int,
    ) -> int:
        producer = self.shards[number].producer
        if rows.first.shard != number:  # the shard that the rows were built for is down
            rows = producer.make_batch(part, on_conflict)
        return producer.schedule_batch(rows, on_conflict, transaction, on_batch)

    def shard_for(self, tag: str, key: str) -> Shard:
        return self.shards[self._selection.home(tag, key)]

    def new_id(self, tag: str | None, key: str | None) -> int:
        if tag is not None and key is not None:
            return self.shard_for(tag, key).new_id()
        if tag is not None or key is not None:
            raise InvalidScheduleError("new_id() takes a tag and a key, or neither")
        return self.shards[self._selection.any()[0]].new_id()

    # -- look up ----------------------------------------------------------------------------------

    def named(self, name: TaskReference, transaction: Transaction | None) -> NamedTask:
        """Return the task that a call names; look a key up."""
        session_shard = self.session_shard(transaction)
        if not isinstance(name, tuple):
            numbers = self._likely(name)
            return NamedTask(
                id_of(name), [self.shards[n] for n in numbers], transaction, session_shard
            )
        tag, key = name
        found = self.databases.named(tag, key, _own(transaction, session_shard))
        if found is None:
            raise TaskNotFoundError(f"no live task of tag {shown(tag)} has the key {shown(key)}")
        number, id = found
        return NamedTask(id, [self.shards[number]], transaction, session_shard)

    def find(
        self,
        where: Filter,
        cursor: str | None,
        limit: int,
        transaction: Transaction | None,
        newest_first: bool,
        time_limit_s: float | None = None,
    ) -> Page:
        own = _own(transaction, self.session_shard(transaction))
        return self.databases.find(where, cursor, limit, own, newest_first, time_limit_s)

    # -- touch ------------------------------------------------------------------------------------

    def touch(
        self, name: TaskReference, delay: Delay | None, transaction: Transaction | None
    ) -> bool:
        named = self.named(name, transaction)
        _, waits = named.move(
            lambda at, on: at.store.touches.touch(named.id, at.producer.due_of(delay), on)
        )
        return waits

    def touch_many(
        self,
        names: Iterable[int | DelayTask],
        delay: Delay | None,
        transaction: Transaction | None,
    ) -> set[int]:
        """Return the ids of the tasks that still wait."""
        session_shard = self.session_shard(transaction)
        if session_shard is None:
            candidates = {id_of(name): self._likely(name) for name in names}
        else:
            candidates = {id_of(name): [session_shard] for name in names}
        touched, down = self._touch_in_turn(candidates, delay, transaction)
        if down is not None:
            raise down
        if session_shard is not None:
            for id in candidates.keys() - touched:
                number = self.databases.likely(id)[0]
                if number != session_shard:
                    refuse_elsewhere(id, [self.shards[number]], session_shard)
        return touched

    def _touch_in_turn(
        self,
        candidates: Mapping[int, Sequence[int]],
        delay: Delay | None,
        transaction: Transaction | None,
    ) -> tuple[set[int], StoreUnavailableError | None]:
        """Look for each task in its candidate shards, the most likely one first.

        Return the ids of the tasks that still wait, and the error of a shard that is unavailable.
        The error does not prevent the calls of the other shards.
        """
        on = connection_of(transaction)
        touched: set[int] = set()
        down: StoreUnavailableError | None = None
        for turn in range(len(self.shards)):
            by_shard: dict[int, list[int]] = {}
            for id, numbers in candidates.items():
                if turn < len(numbers) and id not in touched:
                    by_shard.setdefault(numbers[turn], []).append(id)
            for number, ids in by_shard.items():
                shard = self.shards[number]
                try:
                    touched |= shard.store.touches.touch_many(ids, shard.producer.due_of(delay), on)
                except StoreUnavailableError as error:
                    down = error
        return touched, down

    def touch_keys(
        self,
        tag: str,
        keys: Sequence[str],
        delay: Delay | None,
        transaction: Transaction | None,
    ) -> set[str]:
        """Return the keys whose tasks still wait."""
        own = _own(transaction, self.session_shard(transaction))
        ids, down = self.databases.ids_of_keys(tag, keys, own)
        touched = self.touch_many(ids.values(), delay, transaction)
        if down is not None:
            raise down
        return {key for key, id in ids.items() if id in touched}

    # -- sessions ---------------------------------------------------------------------------------

    def check_shard(self, task: DelayTask, transaction: Transaction | None) -> None:
        """Raise `ShardMismatchError` if the session is not on the shard of `task`."""
        session_shard = self.session_shard(transaction)
        if session_shard is not None and session_shard != task.shard:
            refuse_elsewhere(task.id, [self.shards[task.shard]], session_shard)

    def _likely(self, name: int | DelayTask) -> list[int]:
        if isinstance(name, DelayTask) and name.shard < len(self.shards):
            return [name.shard]
        return self.databases.likely(id_of(name))

    def session_shard(self, transaction: Transaction | None) -> int | None:
        """Return the shard of the caller's session; None without a session."""
        if transaction is None:
            return None
        with transaction.guard() as on:
            return self.databases.of(on)


#: Sends each call to its database.
Router = SingleRouter | ShardRouter


def _own(
    transaction: Transaction | None, session_shard: int | None
) -> tuple[int, CallerConnection] | None:
    if transaction is None or session_shard is None:
        return None
    return session_shard, transaction.connection
