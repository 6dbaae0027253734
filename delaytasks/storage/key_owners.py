"""Decides which task owns a key: takes, keeps, replaces or passes on the key that another task
wants.

Usually the task that owns a key is in the same database. With several databases it may be in
another one. Then the key's row names an id there, and points to the database that decides about the
key (docs/decisions/0021-several-databases.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from sqlalchemy import Connection

from delaytasks.core.clock import from_us, to_us
from delaytasks.core.errors import DuplicateTaskError, StoreUnavailableError
from delaytasks.core.ids import shard_of
from delaytasks.core.interfaces import OnConflict
from delaytasks.core.states import MOVES, following
from delaytasks.core.task import DelayTask
from delaytasks.storage.async_sessions import off_the_loop
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import TRIES
from delaytasks.storage.moves import Moves
from delaytasks.storage.rows import task_of, values_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import Keyed, KeyRow, TaskKeys


class OwnedElsewhereError(Exception):
    """The key's owner waits in another database, where it can be replaced."""

    def __init__(self, owner: DelayTask) -> None:
        super().__init__(owner.id)
        self.owner = owner


class PointsElsewhereError(Exception):
    """Another database has to be asked about the key first."""

    def __init__(self, shard: int) -> None:
        super().__init__(shard)
        self.shard = shard


def changed_too_often(task: DelayTask) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"key {task.key!r} of tag {task.tag!r} changed its owner {TRIES} times; try again"
    )


class KeyOwners:
    """`shards` is the number of databases of the deployment."""

    def __init__(
        self, database: Database, schema: Schema, keys: TaskKeys, moves: Moves, shards: int
    ) -> None:
        self._db = database
        self._schema = schema
        self._shard = schema.shard
        self._keys = keys
        self._moves = moves
        self.rows = keys.rows
        self._shards = shards

    def take(
        self,
        on: Any,
        task: DelayTask,
        on_conflict: OnConflict,
        pointing: Collection[int] = (),
    ) -> tuple[DelayTask, bool]:
        """Return the task that owns the key afterwards, and whether the key or the row is new.

        If the owner is `task` itself, its row has yet to be written. `pointing` are other shards
        whose key rows point to the shard of `task`.
        """
        owner_id = self._take_or_lock(on, task)
        if owner_id is None:
            return task, True
        owner = self._moves.locked(on, owner_id)
        known = (self._shard, task.shard, *pointing)
        if owner is None and self._shards > 1 and shard_of(owner_id) not in known:
            self._point_elsewhere(task, owner_id)
        if owner is None or owner.is_finished:
            # The owner was purged, or another program finished it.
            return self._take_over(on, task)
        if owner.id == task.id:
            return owner, False
        if on_conflict == "reject":
            raise DuplicateTaskError(
                f"task {owner.id} ({owner.status.name}, due {owner.due.isoformat()}) has the key "
                f"{task.key!r} of tag {task.tag!r}; pass on_conflict='keep' or 'replace'",
                owner.id,
            )
        if on_conflict == "keep":
            return owner, False
        if on_conflict == "take" or owner.status not in MOVES["replace"].sources:
            # The owner waits or runs, and may finish. From now on the key belongs to the new task.
            return self._take_over(on, task)
        if owner.shard != task.shard:
            raise OwnedElsewhereError(owner)
        return self._replaced(on, owner, task), True

    def _take_or_lock(self, on: Any, task: DelayTask) -> int | None:
        """Take the key if it is free, else lock it and return the id of its owner."""
        for attempt in range(TRIES):
            # In MySQL a failed INSERT would leave a lock on the key, so the key is read first.
            is_free = (
                self._db.can.insert_or_skip
                or self._keys.id_of(on, task.tag, task.key, attempt > 0) is None
            )
            if is_free and self._keys.take(on, task):
                return None
            # The key's row is locked before the task's, as in settling and cancelling. Else they
            # could deadlock.
            owner_id = self._keys.lock(on, task)
            if owner_id is not None:
                return owner_id
            # The owner has just ended.
        raise changed_too_often(task)

    def _point_elsewhere(self, task: DelayTask, owner_id: int) -> NoReturn:
        shard = shard_of(owner_id)
        if shard < self._shards:
            raise PointsElsewhereError(shard)
        raise DuplicateTaskError(
            f"key {task.key!r} of tag {task.tag!r} belongs to task {owner_id}, which is not here: "
            f"its id names shard {shard}, which this process does not know; "
            "give it the longer delaytasks_database_url",
            owner_id,
        )

    def _take_over(self, on: Any, task: DelayTask) -> tuple[DelayTask, bool]:
        if not self._keys.pass_to(on, task):
            # This happens only if each statement is a transaction, so that no lock lasts.
            raise changed_too_often(task)
        return task, True

    def _replaced(self, on: Any, owner: DelayTask, task: DelayTask) -> DelayTask:
        # The row keeps its id, to which the encryption of the new body is bound.
        task = replace(task, id=owner.id, expected_time=_due_of_replacement(task, owner))
        values = values_of(task, self._schema)
        values.pop("create_time")
        self._moves.make(
            on, "replace", owner, {**values, "attempts": 0, "lapses": 0, "error_stack": None}
        )
        version = following(owner.version)
        return replace(task, version=version, create_time=owner.create_time, shard=owner.shard)

    # -- several databases ------------------------------------------------------------------------

    def point(
        self, task: DelayTask, on_conflict: OnConflict, pointing: Collection[int] = ()
    ) -> tuple[DelayTask, bool] | None:
        """Let the key's row point to the database of `task`, and write nothing else.

        Returns None, or the answer of `take` if a task here owns the key and keeps it.
        """

        answer = self._db.transaction(lambda c: self.take(c, task, on_conflict, pointing))
        return None if answer[0] is task else answer

    @contextmanager
    def pointing(self, task: DelayTask) -> Iterator[bool]:
        """Whether the key's row points to the database of `task`, which stays so inside the
        context."""

        def lock() -> tuple[Connection, int | None]:
            connection = self._db.tx.connect()
            try:
                return connection, self._keys.lock(connection, task)
            except BaseException:
                connection.close()
                raise

        connection, id = self._db.run(lock)
        try:
            yield id is not None and shard_of(id) == task.shard
        finally:
            off_the_loop(connection.close)

    def live(self, task: Keyed) -> DelayTask | None:
        """Return the live task here that owns the key. Wait for a transaction that is about to take
        it."""

        def look(connection: Connection) -> DelayTask | None:
            id = self._keys.lock(connection, task)
            if id is None and not self._keys.take(connection, task):
                id = self._keys.lock(connection, task)
            row = connection.execute(self._moves.get, {"task_id": id}).first()
            found = None if row is None else task_of(row, self._schema)
            return None if found is None or found.is_finished else found

        return self._db.repeat(look, self._db.tx.connect)  # never committed

    def drop(self, pointer: KeyRow, is_dead: Callable[[], bool]) -> bool:
        """Free a key that points to another database if no task owns it there. Returns whether it
        was freed."""

        def work(connection: Any) -> bool:
            # The lock delays a task that is being scheduled with this key.
            if self._keys.lock(connection, pointer) != pointer.id or not is_dead():
                return False
            self._keys.release(connection, pointer)
            return True

        return self._db.transaction(work)

    def replace(self, owner: DelayTask, task: DelayTask) -> DelayTask | None:
        """Replace `owner`, a task here. Returns None if it no longer waits, or no longer owns the
        key."""

        def work(connection: Any) -> DelayTask | None:
            has_key = self._keys.lock(connection, task) == owner.id
            found = self._moves.locked(connection, owner.id) if has_key else None
            if found is None or found.status not in MOVES["replace"].sources:
                return None
            return self._replaced(connection, found, task)

        return self._db.transaction(work, unknown_id=owner.id)


def _due_of_replacement(task: DelayTask, owner: DelayTask) -> datetime:
    """Return when the task that replaces `owner` is due.

    Repeated replacements can defer a task by at most `max_wait_s` after the first of them was
    created, or after the last run of a task that is to run again.
    """
    began = owner.execution_time or owner.create_time
    if task.max_wait_s is None or began is None:
        return task.expected_time
    # Computed with numbers, since another program's row may have been created at the end of time.
    return from_us(min(to_us(task.expected_time), to_us(began) + int(task.max_wait_s * 1e6)))
