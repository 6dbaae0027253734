"""Several databases as one: which of them has a task, and which decides about a key.

A key has a home (core/shards.py), where its tasks are scheduled and conflicts decided. A task whose key belongs
elsewhere (it was scheduled before a shard was added, and no row moves) is found through a pointer: in the home's table
of keys the key names its id, and the id its shard. While a shard is being added, processes that do not know it yet take
a key's old home for its home: there the pointer leads to the new one (docs/decisions/0021-several-databases.md).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import cache
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import URL

from delaytasks.core.errors import ShardMismatchError, StoreUnavailableError
from delaytasks.core.ids import shard_of
from delaytasks.core.interfaces import Executor, OnConflict
from delaytasks.core.masking import mask_url
from delaytasks.core.shards import home_of
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, Page
from delaytasks.storage import pages
from delaytasks.storage.database_addresses import addresses_of
from delaytasks.storage.driver_errors import REMEDY, TRIES
from delaytasks.storage.key_owners import (
    HeldElsewhereError,
    PointsElsewhereError,
    refuse_unknown,
    restless,
)
from delaytasks.storage.migrations import number_of
from delaytasks.storage.store import Store
from delaytasks.storage.tasks import Tasks

T = TypeVar("T")
#: Tag, status, key, and from when until when.
By = tuple[str | None, Status | None, str | None, datetime | None, datetime | None]


class Shards:
    def __init__(self, stores: Sequence[Store], before: int | None) -> None:
        self.stores = stores
        self._places = [addresses_of(store.database.url) for store in stores]
        #: What the databases of callers' engines said, where their URLs fit several shards.
        self._told: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._before = before
        self._checked: set[int] = set()
        for store in stores:
            store.tasks.key_owners.point_elsewhere = self._point_elsewhere

    def store(self, number: int) -> Store:
        """The first time in this process it is made sure that it is the shard that it should be."""
        store = self.stores[number]
        if len(self.stores) > 1 and number not in self._checked:
            store.check_number()
            self._checked.add(number)
        return store

    def has(self, url: URL) -> bool:
        return bool(self._at(url))

    def _at(self, url: URL) -> list[int]:
        """The shards that a URL may lead to."""
        places = addresses_of(url)
        return [number for number, own in enumerate(self._places) if own & places]

    def of(self, connection: Any) -> int:
        """The shard that a caller's connection is on."""
        engine = connection.engine
        url, numbers = engine.url, self._at(engine.url)
        if len(numbers) > 1:
            if engine not in self._told:
                self._told[engine] = self._ask(connection, numbers)
            return self._told[engine]
        if not numbers:
            raise ShardMismatchError(
                f"the session's database ({mask_url(url.render_as_string())}) is none of delaytasks_database_url: "
                "host, port and name must be the same as there"
            )
        return numbers[0]

    def _ask(self, connection: Any, numbers: Sequence[int]) -> int:
        """The number that the database of a caller's connection has."""
        number = number_of(connection, self.stores[0].schema)
        if number is None or number not in numbers:
            url, those = (
                mask_url(connection.engine.url.render_as_string()),
                ", ".join(map(str, numbers)),
            )
            raise ShardMismatchError(
                f"the session's database ({url}) may be one of the shards {those}, and says its number is {number}; "
                f"{REMEDY}, or give each shard a host, port or name of its own"
            )
        return number

    # -- look up ----------------------------------------------------------------------------------

    def likely(self, id: int) -> list[int]:
        """All shards, and first the one that the id names. Ids that other programs made say nothing true."""
        numbers = list(range(len(self.stores)))
        numbers.sort(key=lambda number: number != shard_of(id))
        return numbers

    def named(self, tag: str, key: str, own: tuple[int, Executor] | None) -> tuple[int, int] | None:
        """The shard and the id of the task that has the key. `own` is the caller's shard and connection."""
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
        self, tag: str, keys: Sequence[str], own: tuple[int, Executor] | None
    ) -> tuple[dict[str, int], StoreUnavailableError | None]:
        """By key, of those that a live task has, wherever that is; and why some of them could not be looked up."""
        found: dict[str, int] = {}
        down: StoreUnavailableError | None = None
        for turn in range(2):  # their homes, then those before
            homes: dict[int, list[str]] = {}
            for key in keys:
                if key not in found and turn < len(wanted := self._homes(tag, key)):
                    homes.setdefault(wanted[turn], []).append(key)
            for home, some in homes.items():
                try:
                    for key, id in (
                        self.store(home).touches.ids_of_keys(tag, some, _on(own, home)).items()
                    ):
                        if shard_of(id) == home:
                            found[key] = id
                        elif (held := self.named(tag, key, own)) is not None:
                            found[key] = held[1]
                except StoreUnavailableError as error:
                    down = error
        return found, down

    def find(
        self,
        by: By,
        cursor: str | None,
        limit: int,
        own: tuple[int, Executor] | None,
        newest_first: bool = False,
    ) -> Page:
        """A page of all shards' tasks; `by` is what `Tasks.find` looks for."""
        found: list[Page] = []
        missing: dict[int, StoreUnavailableError] = {}
        for number in range(len(self.stores)):
            try:
                found.append(
                    self._tasks(number).find(*by, cursor, limit, _on(own, number), newest_first)
                )
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
        self, task: DelayTask, on_conflict: OnConflict, on: Executor | None = None
    ) -> tuple[DelayTask, bool]:
        """As `Tasks.insert_keyed`, for a task whose home is its shard."""
        home, others = self.store(task.shard), self._others(task)
        for _ in range(TRIES):
            try:
                with self._pointing(others, task, on_conflict) as answer:
                    return answer or home.tasks.insert_keyed(task, on_conflict, on, others)
            except PointsElsewhereError as pointer:
                others = [pointer.shard, *others]
            except HeldElsewhereError as held:
                if on is not None and not home.database.owns(on):
                    raise ShardMismatchError(
                        f"task {held.owner.id}, which has the key {task.key!r} of tag {task.tag!r}, is in shard "
                        f"{held.owner.shard}, and the session is on shard {task.shard}: replace it without session="
                    ) from None
                replaced = self._tasks(held.owner.shard).key_owners.replace(held.owner, task)
                if replaced is not None:
                    return replaced, True
        raise restless(task)

    def retry(
        self,
        number: int,
        id: int,
        due: datetime,
        version: int | None = None,
        on: Executor | None = None,
    ) -> DelayTask:
        """As `Tasks.retry`: whoever decides about the task's key by now must know that it is back."""
        tasks = self._tasks(number)
        task = tasks.get(id, on)
        if task is None or task.key is None:
            return tasks.retry(id, due, version, on)
        before, after = self._others(task), []
        if number != home_of(task.tag, task.key, len(self.stores)):  # everybody locks the home last
            after = [before.pop()]
        for _ in range(TRIES):
            try:
                with ExitStack() as held, self._pointing(before, task, "reject"):
                    once_held = cache(
                        lambda: held.enter_context(self._pointing(after, task, "reject"))
                    )
                    return tasks.retry(id, due, version, on, [*before, *after], once_held)
            except PointsElsewhereError as pointer:
                before = [pointer.shard, *before]
        raise restless(task)

    @contextmanager
    def _pointing(
        self, others: Sequence[int], task: DelayTask, on_conflict: OnConflict
    ) -> Iterator[tuple[DelayTask, bool] | None]:
        """Inside, the others point to the shard of `task`. Or the answer is known: there is a task that keeps the
        key."""
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
        raise restless(task)

    def _others(self, task: DelayTask) -> list[int]:
        """Who may be asked about the task's key, but for its own shard; the home comes last."""
        return [
            number
            for number in reversed(self._homes(task.tag, task.key or ""))
            if number != task.shard
        ]

    def _point_elsewhere(self, task: DelayTask, id: int) -> NoReturn:
        if shard_of(id) >= len(self.stores):
            refuse_unknown(task, id)
        raise PointsElsewhereError(shard_of(id))

    def _homes(self, tag: str, key: str) -> list[int]:
        """The home, and the one that processes take for it which do not know the newest shards."""
        counts = [len(self.stores), *([] if self._before is None else [self._before])]
        return list(dict.fromkeys(home_of(tag, key, count) for count in counts))

    def _tasks(self, number: int) -> Tasks:
        return self.store(number).tasks

    def _id_of_key(
        self, number: int, tag: str, key: str, own: tuple[int, Executor] | None
    ) -> int | None:
        return self._tasks(number).id_of_key(tag, key, _on(own, number))


class ShardTasks:
    """One of several shards, as its producer sees it."""

    def __init__(self, shards: Shards, number: int) -> None:
        self._shards = shards
        self._number = number
        self.insert_keyed = shards.insert_keyed

    def together(self, work: Callable[[Any], T], unknown_id: int) -> T:
        return self._tasks.together(work, unknown_id)

    def insert(self, task: DelayTask, on: Executor | None = None) -> bool:
        return self._tasks.insert(task, on)

    def insert_many(self, tasks: Sequence[DelayTask], on: Executor | None = None) -> bool:
        return self._tasks.insert_many(tasks, on)

    def get(self, id: int, on: Executor | None = None) -> DelayTask | None:
        return self._tasks.get(id, on)

    @property
    def _tasks(self) -> Tasks:
        return self._shards.store(self._number).tasks


def _on(own: tuple[int, Executor] | None, number: int) -> Executor | None:
    return own[1] if own is not None and own[0] == number else None
