"""Which of a deployment's databases a call goes to.

With several a key has a home, an id names its shard, a session is on one, and all else goes to any shard that is up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import NamedTuple, TypeVar

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import (
    InvalidScheduleError,
    ShardMismatchError,
    StoreUnavailableError,
    TaskNotFoundError,
)
from delaytasks.core.interfaces import Executor, OnConflict, Transaction
from delaytasks.core.task import DelayTask, NewTask, Page, id_of
from delaytasks.core.text import shown
from delaytasks.scheduling.producer import BULK, RowBatch
from delaytasks.sharding.databases import By, Shards
from delaytasks.sharding.selection import ShardSelection
from delaytasks.sharding.shard import Shard

T = TypeVar("T")
#: A task as a call names it: as it was read, by its id, by its tag and key.
Name = DelayTask | int | tuple[str, str]
#: What all shards do side by side may take so long.
EACH_S = 10.0
Written = Callable[[Sequence[DelayTask]], None]


class Named(NamedTuple):
    """A task that a call names, and the call's transaction."""

    id: int
    #: Where it may be, the likeliest first.
    shards: Sequence[Shard]
    transaction: Transaction | None
    #: The shard that the session is on; None without a session, and where there is one shard.
    session: int | None

    def read(self, work: Callable[[Shard, Executor | None], T]) -> T:
        """Of the shard that has the task: with the session, if it is there."""
        for shard in self.shards:
            try:
                return work(shard, self._on(shard))
            except TaskNotFoundError:
                continue
        raise TaskNotFoundError(f"there is no task {self.id}", self.id)

    def move(self, work: Callable[[Shard, Executor | None], T]) -> tuple[Shard, T]:
        """In the session's transaction, if there is a session."""
        for shard in self.shards:
            if self.session in (None, shard.number):
                try:
                    return shard, work(shard, self._on(shard))
                except TaskNotFoundError:
                    continue
        if self.session is not None:
            refuse_elsewhere(
                self.id,
                [shard for shard in self.shards if shard.number != self.session],
                self.session,
            )
        raise TaskNotFoundError(f"there is no task {self.id}", self.id)

    def _on(self, shard: Shard) -> Executor | None:
        return (
            self.transaction.executor
            if self.transaction is not None and self.session in (None, shard.number)
            else None
        )


class ShardRouter:
    def __init__(
        self, shards: Sequence[Shard], databases: Shards, shard_selection: ShardSelection
    ) -> None:
        self.shards = shards
        self.databases = databases
        self._shard_selection = shard_selection
        self._is_one = len(shards) == 1

    def each(self, work: Callable[[Shard], object]) -> list[Shard]:
        """`work` for every shard, side by side; returns those that took too long, which nobody waits for any more."""
        if self._is_one:
            work(self.shards[0])
            return []
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
        ends = monotonic() + EACH_S
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
        if self._is_one:
            return self.shards[0].producer.schedule(new, on_conflict, transaction)
        numbers = self._shard_selection.of(new, self._session(transaction))
        return self._shard_selection.run(
            numbers,
            lambda number: self.shards[number].producer.schedule(new, on_conflict, transaction),
        )

    def schedule_many(
        self,
        tasks: Iterable[NewTask],
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: Written | None,
    ) -> int:
        if self._is_one:
            return self.shards[0].producer.schedule_many(tasks, on_conflict, transaction, on_batch)
        total, source, session = 0, iter(tasks), self._session(transaction)
        while batch := list(itertools.islice(source, BULK)):
            parts: dict[tuple[int, ...], list[NewTask]] = {}
            anywhere = self._shard_selection.any()
            for new in batch:
                parts.setdefault(self._shard_selection.of(new, session, anywhere), []).append(new)
            # All are checked before one is written.
            built = [
                (numbers, some, self._build(numbers, some, on_conflict))
                for numbers, some in parts.items()
            ]
            for numbers, some, row_batch in built:
                total += self._shard_selection.run(
                    numbers,
                    partial(self._write, some, row_batch, on_conflict, transaction, on_batch),
                )
        return total

    def _build(
        self, numbers: Sequence[int], some: Sequence[NewTask], on_conflict: OnConflict
    ) -> RowBatch:
        return self._shard_selection.run(
            numbers, lambda number: self.shards[number].producer.make_batch(some, on_conflict)
        )

    def _write(
        self,
        some: Sequence[NewTask],
        row_batch: RowBatch,
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: Written | None,
        number: int,
    ) -> int:
        producer = self.shards[number].producer
        if row_batch.first.shard != number:  # the one that it was made for is down
            row_batch = producer.make_batch(some, on_conflict)
        return producer.schedule_batch(row_batch, on_conflict, transaction, on_batch)

    def shard_for(self, tag: str, key: str) -> Shard:
        return self.shards[self._shard_selection.home(tag, key)]

    def new_id(self, tag: str | None, key: str | None) -> int:
        if (tag is None) != (key is None):
            raise InvalidScheduleError("new_id() takes a tag and a key, or neither")
        number = (
            self._shard_selection.any()[0]
            if tag is None or key is None
            else self._shard_selection.home(tag, key)
        )
        return self.shards[number].new_id()

    # -- find -------------------------------------------------------------------------------------

    def named(self, name: Name, transaction: Transaction | None) -> Named:
        """What a call names."""
        session = self._session(transaction)
        if isinstance(name, tuple):
            number, id = self._held(*name, transaction, session)
            return Named(id, [self.shards[number]], transaction, session)
        return Named(
            id_of(name),
            [self.shards[number] for number in self._likely(name)],
            transaction,
            session,
        )

    def find(
        self,
        by: By,
        cursor: str | None,
        limit: int,
        transaction: Transaction | None,
        newest_first: bool,
    ) -> Page:
        if self._is_one:
            return self.shards[0].store.tasks.find(
                *by, cursor, limit, _executor(transaction), newest_first
            )
        return self.databases.find(
            by, cursor, limit, self._own(transaction, self._session(transaction)), newest_first
        )

    def _held(
        self, tag: str, key: str, transaction: Transaction | None, session: int | None
    ) -> tuple[int, int]:
        """The shard and the id of a key's task."""
        if self._is_one:
            id = self.shards[0].store.tasks.id_of_key(tag, key, _executor(transaction))
            found = None if id is None else (0, id)
        else:
            found = self.databases.named(tag, key, self._own(transaction, session))
        if found is None:
            raise TaskNotFoundError(f"no live task of tag {shown(tag)} has the key {shown(key)}")
        return found

    # -- touch ------------------------------------------------------------------------------------

    def touch(
        self, name: Name, delay: float | timedelta | None, transaction: Transaction | None
    ) -> bool:
        if isinstance(name, tuple) and self._is_one:
            shard = self.shards[0]
            return shard.store.touches.touch_key(
                *name, shard.producer.due_of(delay), _executor(transaction)
            )
        named = self.named(name, transaction)
        return named.move(
            lambda at, on: at.store.touches.touch(named.id, at.producer.due_of(delay), on)
        )[1]

    def touch_many(
        self,
        names: Iterable[int | DelayTask],
        delay: float | timedelta | None,
        transaction: Transaction | None,
    ) -> set[int]:
        """The ids of those that wait."""
        session = self._session(transaction)
        if session is not None or self._is_one:
            shards = {id_of(name): [session or 0] for name in names}
        else:
            shards = {id_of(name): self._likely(name) for name in names}
        touched: set[int] = set()
        down: StoreUnavailableError | None = None
        for turn in range(len(self.shards)):  # first where they should be
            asked: dict[int, list[int]] = {}
            for id, numbers in shards.items():
                if turn < len(numbers) and id not in touched:
                    asked.setdefault(numbers[turn], []).append(id)
            for number, ids in asked.items():
                shard = self.shards[number]
                try:
                    touched |= shard.store.touches.touch_many(
                        ids, shard.producer.due_of(delay), _executor(transaction)
                    )
                except StoreUnavailableError as error:
                    down = error  # told when the others are done: their timeouts must not run out for it
        if down is not None:
            raise down
        if session is not None:
            for id in shards.keys() - touched:
                number = self.databases.likely(id)[0]
                refuse_elsewhere(id, [self.shards[number]] if number != session else [], session)
        return touched

    def touch_keys(
        self,
        tag: str,
        keys: Sequence[str],
        delay: float | timedelta | None,
        transaction: Transaction | None,
    ) -> set[str]:
        """Those whose tasks wait."""
        down: StoreUnavailableError | None = None
        if self._is_one:
            ids = self.shards[0].store.touches.ids_of_keys(tag, keys, _executor(transaction))
        else:
            ids, down = self.databases.ids_of_keys(
                tag, keys, self._own(transaction, self._session(transaction))
            )
        touched = self.touch_many(ids.values(), delay, transaction)
        if down is not None:
            raise down
        return {key for key, id in ids.items() if id in touched}

    def _likely(self, name: int | DelayTask) -> list[int]:
        if isinstance(name, DelayTask) and name.shard < len(self.shards):
            return [name.shard]
        return self.databases.likely(id_of(name))

    def same(self, task: DelayTask, transaction: Transaction | None) -> None:
        """`ShardMismatchError` when the session is elsewhere than a task that was read."""
        session = self._session(transaction)
        if session not in (None, task.shard):
            refuse_elsewhere(task.id, [self.shards[task.shard]], session)

    def _session(self, transaction: Transaction | None) -> int | None:
        """The shard that the caller's session is on; with one shard nobody asks."""
        if transaction is None or self._is_one:
            return None
        with transaction.guard() as on:
            return self.databases.of(on)

    @staticmethod
    def _own(transaction: Transaction | None, session: int | None) -> tuple[int, Executor] | None:
        return None if transaction is None or session is None else (session, transaction.executor)


def refuse_elsewhere(id: int, shards: Iterable[Shard], session: int) -> None:
    """If the task is in one of these shards, none of which the session is on."""
    for shard in shards:
        if shard.store.tasks.get(id) is not None:
            raise ShardMismatchError(
                f"task {id} is in shard {shard.number}, and the session is on shard {session}; open one on that "
                "database, or call without session="
            )


def _executor(transaction: Transaction | None) -> Executor | None:
    return None if transaction is None else transaction.executor
