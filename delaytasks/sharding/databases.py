"""Several databases as one: which of them has a task, and which decides about a key.

A key has a home (core/shards.py), where its tasks are scheduled and conflicts are decided. A task
whose key has another home was scheduled before a shard was added, since no row moves. It is found
through a pointer: the key's row in the home names the task's id, and the id contains its shard.
While a shard is being added, processes that do not know it yet use a key's old home. There the
pointer leads to the new home (docs/decisions/0021-several-databases.md).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from delaytasks.core.errors import ShardMismatchError, StoreUnavailableError
from delaytasks.core.filters import Filter
from delaytasks.core.ids import home_of, shard_of
from delaytasks.core.interfaces import CallerConnection, OnConflict
from delaytasks.core.masking import mask_url
from delaytasks.core.page import Page
from delaytasks.core.task import DelayTask
from delaytasks.storage import pages
from delaytasks.storage.database_addresses import addresses_of
from delaytasks.storage.driver_errors import TRIES
from delaytasks.storage.key_owners import (
    OwnedElsewhereError,
    PointsElsewhereError,
    changed_too_often,
)
from delaytasks.storage.migrations import number_of
from delaytasks.storage.store import Store
from delaytasks.storage.tasks import Tasks

T = TypeVar("T")


class Shards:
    def __init__(self, stores: Sequence[Store], before: int | None) -> None:
        self.stores = stores
        #: The numbers stored in the databases of callers' engines, if a URL fits several shards.
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._before = before
        self._checked: set[int] = set()

    def store(self, number: int) -> Store:
        """Return a store. Before its first use in this process, check that it is the shard that it
        should be."""
        store = self.stores[number]
        if len(self.stores) > 1 and number not in self._checked:
            store.check_number()
            self._checked.add(number)
        return store

    def of(self, connection: Any) -> int:
        """Return the shard of a caller's connection."""
        engine = connection.engine
        url, addresses = engine.url, addresses_of(engine.url)
        numbers = [store.shard for store in self.stores if store.database.addresses & addresses]
        if len(numbers) > 1:
            if engine not in self._numbers:
                self._numbers[engine] = self._ask(connection, numbers)
            return self._numbers[engine]
        if not numbers:
            raise ShardMismatchError(
                f"the session's database ({mask_url(url.render_as_string())}) is not in "
                "delaytasks_database_url: host, port and name must be the same as there"
            )
        return numbers[0]

    def _ask(self, connection: Any, numbers: Sequence[int]) -> int:
        """Read the number in the database of a caller's connection."""
        number = number_of(connection, self.stores[0].schema)
        if number is None or number not in numbers:
            url = mask_url(connection.engine.url.render_as_string())
            raise ShardMismatchError(
                f"the session's database ({url}) may be one of the shards "
                f"{', '.join(map(str, numbers))}, but contains the number {number}; "
                f"{self.stores[0].database.tables_remedy}, or give each shard a host, port or "
                "name of its own"
            )
        return number

    # -- look up ----------------------------------------------------------------------------------

    def likely(self, id: int) -> list[int]:
        """Return all shards, the one that the id names first. Ids of other programs name arbitrary
        shards."""
        numbers = list(range(len(self.stores)))
        numbers.sort(key=lambda number: number != shard_of(id))
        return numbers

    def named(
        self, tag: str, key: str, own: tuple[int, CallerConnection] | None
    ) -> tuple[int, int] | None:
        """Return the shard and the id of the key's task. `own` is the caller's shard and
        connection."""
        for home in self._homes(tag, key):
            id = self._id_of_key(home, tag, key, own)
            if id is None:
                continue
            if shard_of(id) == home or self._tasks(home).get(id, _on(own, home)) is not None:
                return home, id
            number = shard_of(id)
            if number < len(self.stores):
                pointed = self._id_of_key(number, tag, key, own)
                if (
                    pointed is not None
                    and self._tasks(number).get(pointed, _on(own, number)) is not None
                ):
                    return number, pointed
        return None

    def ids_of_keys(
        self, tag: str, keys: Sequence[str], own: tuple[int, CallerConnection] | None
    ) -> tuple[dict[str, int], StoreUnavailableError | None]:
        """Return the ids of live tasks by key, and the error that prevented some lookups."""
        found: dict[str, int] = {}
        down: StoreUnavailableError | None = None
        for turn in range(2):  # the homes, then the old homes
            homes: dict[int, list[str]] = {}
            for key in keys:
                if key not in found and turn < len(wanted := self._homes(tag, key)):
                    homes.setdefault(wanted[turn], []).append(key)
            for home, some in homes.items():
                try:
                    ids = self.store(home).touches.ids_of_keys(tag, some, _on(own, home))
                    for key, id in ids.items():
                        if shard_of(id) == home:
                            found[key] = id
                        elif (owned := self.named(tag, key, own)) is not None:
                            found[key] = owned[1]
                except StoreUnavailableError as error:
                    down = error
        return found, down

    def find(
        self,
        where: Filter,
        cursor: str | None,
        limit: int,
        own: tuple[int, CallerConnection] | None,
        newest_first: bool = False,
        time_limit_s: float | None = None,
    ) -> Page:
        """Return a page of all shards' tasks. The limit applies to each shard."""
        found: list[Page] = []
        missing: dict[int, StoreUnavailableError] = {}
        for number in range(len(self.stores)):
            try:
                on, tasks_of = _on(own, number), self._tasks(number)
                found.append(tasks_of.find(where, limit, cursor, on, newest_first, time_limit_s))
            except StoreUnavailableError as error:
                missing[number] = error
        if not found:
            raise next(iter(missing.values()))
        tasks = list(
            heapq.merge(*(page.tasks for page in found), key=pages.place, reverse=newest_first)
        )
        has_more = len(tasks) > limit or any(page.cursor is not None for page in found)
        tasks = tasks[:limit]
        return Page(tasks, pages.make_cursor(tasks[-1]) if has_more else None, tuple(missing))

    # -- keys -------------------------------------------------------------------------------------

    def insert_keyed(
        self, task: DelayTask, on_conflict: OnConflict, on: CallerConnection | None = None
    ) -> tuple[DelayTask, bool]:
        """Do what `Tasks.insert_keyed` does, for a task in the home of its key."""
        home, others = self.store(task.shard), self._others(task)
        for _ in range(TRIES):
            try:
                with self._pointing(others, task, on_conflict) as answer:
                    return answer or home.tasks.insert_keyed(task, on_conflict, on, others)
            except PointsElsewhereError as pointer:
                others = [pointer.shard, *others]
            except OwnedElsewhereError as elsewhere:
                if on is not None and not home.database.owns(on):
                    raise ShardMismatchError(
                        f"task {elsewhere.owner.id}, which has the key {task.key!r} of tag "
                        f"{task.tag!r}, is in shard {elsewhere.owner.shard}, and the session is on "
                        f"shard {task.shard}: replace it without session="
                    ) from None
                replaced = self._tasks(elsewhere.owner.shard).key_owners.replace(
                    elsewhere.owner, task
                )
                if replaced is not None:
                    return replaced, True
        raise changed_too_often(task)

    def rerun(
        self,
        number: int,
        id: int,
        due: datetime,
        version: int | None = None,
        on: CallerConnection | None = None,
    ) -> DelayTask:
        """Do what `Tasks.rerun` does, and let the shard that decides about the key know the task
        again."""
        tasks = self._tasks(number)
        task = tasks.get(id, on)
        if task is None or task.key is None:
            return tasks.rerun(id, due, version, on)
        before, after = self._others(task), []
        if number != home_of(
            task.tag, task.key, len(self.stores)
        ):  # every process locks the home last
            after = [before.pop()]
        for _ in range(TRIES):
            try:
                with ExitStack() as pointers, self._pointing(before, task, "reject"):
                    once_held = cache(
                        lambda: pointers.enter_context(self._pointing(after, task, "reject"))
                    )
                    return tasks.rerun(id, due, version, on, [*before, *after], once_held)
            except PointsElsewhereError as pointer:
                before = [pointer.shard, *before]
        raise changed_too_often(task)

    @contextmanager
    def _pointing(
        self, others: Sequence[int], task: DelayTask, on_conflict: OnConflict
    ) -> Iterator[tuple[DelayTask, bool] | None]:
        """Let the other shards point to the shard of `task` inside the context. Yields the task
        that keeps the key, if there is one."""
        for _ in range(TRIES):
            for number in others:
                answer = self._tasks(number).key_owners.point(task, on_conflict, others)
                if answer is not None:
                    yield answer
                    return
            with ExitStack() as stack:
                if all(
                    stack.enter_context(self._tasks(number).key_owners.pointing(task))
                    for number in others
                ):
                    yield None
                    return
        raise changed_too_often(task)

    def _others(self, task: DelayTask) -> list[int]:
        """Return the shards that may decide about the key, except its own; the home comes last."""
        return [
            number
            for number in reversed(self._homes(task.tag, task.key or ""))
            if number != task.shard
        ]

    def _homes(self, tag: str, key: str) -> list[int]:
        """Return the home, and the home as processes see it that do not know the newest shards."""
        counts = [len(self.stores), *([] if self._before is None else [self._before])]
        return list(dict.fromkeys(home_of(tag, key, count) for count in counts))

    def _tasks(self, number: int) -> Tasks:
        return self.store(number).tasks

    def _id_of_key(
        self, number: int, tag: str, key: str, own: tuple[int, CallerConnection] | None
    ) -> int | None:
        return self._tasks(number).id_of_key(tag, key, _on(own, number))


class ShardTasks:
    """The tasks of one shard, as its producer uses them."""

    def __init__(self, shards: Shards, number: int) -> None:
        self._shards = shards
        self._number = number
        self.insert_keyed = shards.insert_keyed

    def together(self, work: Callable[[Any], T], unknown_id: int) -> T:
        return self._tasks.together(work, unknown_id)

    def insert(self, task: DelayTask, on: CallerConnection | None = None) -> bool:
        return self._tasks.insert(task, on)

    def insert_many(self, tasks: Sequence[DelayTask], on: CallerConnection | None = None) -> bool:
        return self._tasks.insert_many(tasks, on)

    def get(self, id: int, on: CallerConnection | None = None) -> DelayTask | None:
        return self._tasks.get(id, on)

    @property
    def _tasks(self) -> Tasks:
        return self._shards.store(self._number).tasks


def _on(own: tuple[int, CallerConnection] | None, number: int) -> CallerConnection | None:
    return own[1] if own is not None and own[0] == number else None
