"""Who has a key: taken, kept, replaced or passed on when another task wants it.

Mostly the task that has a key is in the same database. With several it may be in another one: then the key's row names
an id there, and points to the database that decides about the key (docs/decisions/0021-several-databases.md).
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
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import TRIES
from delaytasks.storage.moves import Moves
from delaytasks.storage.rows import task_of, values_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import Keyed, KeyRow, TaskKeys

#: Does what is to be done once a task has its key.
Write = Callable[[Any, DelayTask], object]


class HeldElsewhereError(Exception):
    """The key's task waits in another database, where it can be replaced."""

    def __init__(self, owner: DelayTask) -> None:
        super().__init__(owner.id)
        self.owner = owner


class PointsElsewhereError(Exception):
    """Another database has to be asked first about the key."""

    def __init__(self, shard: int) -> None:
        super().__init__(shard)
        self.shard = shard


def refuse_unknown(task: DelayTask, owner_id: int) -> NoReturn:
    raise DuplicateTaskError(
        f"key {task.key!r} of tag {task.tag!r} belongs to task {owner_id}, which is not here: its id names shard "
        f"{shard_of(owner_id)}, which this process does not know; give it the longer delaytasks_database_url",
        owner_id,
    )


def restless(task: DelayTask) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"key {task.key!r} of tag {task.tag!r} changed hands {TRIES} times; try again"
    )


class KeyOwners:
    def __init__(self, database: Database, schema: Schema, keys: TaskKeys, moves: Moves) -> None:
        self._db = database
        self._schema = schema
        self._shard = schema.shard
        self._keys = keys
        self._moves = moves
        self.rows = keys.rows
        #: What is to be done about a key whose row here names an id of another database.
        self.point_elsewhere: Callable[[DelayTask, int], NoReturn] = refuse_unknown

    def take(
        self,
        on: Any,
        task: DelayTask,
        on_conflict: OnConflict,
        write: Write,
        pointing: Collection[int] = (),
    ) -> tuple[DelayTask, bool]:
        """The task that has the key afterwards, and whether that is news: `task` itself, once `write` is done. The
        shards that are `pointing` to the one of `task` are asked besides."""
        for attempt in range(TRIES):
            # In MySQL a failed INSERT would leave a lock on the key, so a look comes first there.
            is_free = (
                self._db.can.insert_or_skip
                or self._keys.id_of(on, task.tag, task.key, attempt > 0) is None
            )
            if is_free and self._keys.take(on, task):
                write(on, task)
                return task, True
            # The key's row first, then the task's: settling and cancelling go the same way, or they would deadlock.
            owner_id = self._keys.lock(on, task)
            if owner_id is not None:
                break  # else its task has just ended
        else:
            raise restless(task)
        owner = self._moves.locked(on, owner_id)
        if owner is None and shard_of(owner_id) not in (self._shard, task.shard, *pointing):
            self.point_elsewhere(task, owner_id)
        if owner is None or owner.is_finished:
            return self._take_over(
                on, task, write
            )  # what had the key was purged, or finished by another program
        if owner.id == task.id:
            return owner, False
        if on_conflict == "reject":
            raise DuplicateTaskError(
                f"task {owner.id} ({owner.status.name}, due {owner.due.isoformat()}) has the key "
                f"{task.key!r} of tag {task.tag!r}; on_conflict='keep' or 'replace' says what else to do",
                owner.id,
            )
        if on_conflict == "keep":
            return owner, False
        if owner.status not in MOVES["replace"].sources:
            return self._take_over(
                on, task, write
            )  # it runs: it may finish, the new one is the key's from now on
        if owner.shard != task.shard:
            raise HeldElsewhereError(owner)
        return self._replaced(on, owner, task), True

    def _take_over(self, on: Any, task: DelayTask, write: Write) -> tuple[DelayTask, bool]:
        self._keys.pass_to(on, task)
        write(on, task)
        return task, True

    def _replaced(self, on: Any, owner: DelayTask, task: DelayTask) -> DelayTask:
        # The row keeps its id, for which the new body is encrypted.
        task = replace(task, id=owner.id, expected_time=_defer(task, owner))
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
        """From now on the key's row points to the database of `task`, and nothing else is written. Or the answer, as of
        `take`: a task here has the key, and keeps it."""

        def work() -> tuple[DelayTask, bool]:
            with self._db.begin() as connection:
                return self.take(connection, task, on_conflict, lambda *_: None, pointing)

        answer = self._db.run(work)
        return None if answer[0] is task else answer

    @contextmanager
    def pointing(self, task: DelayTask) -> Iterator[bool]:
        """Whether the key's row points to the database of `task`; what it says stays so until the end."""

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
            connection.close()

    def live(self, task: Keyed) -> DelayTask | None:
        """The live task here that has the key of `task`; one that is about to have it is waited for."""

        def look() -> DelayTask | None:
            with self._db.tx.connect() as connection:  # ends without a commit
                id = self._keys.lock(connection, task)
                if id is None and not self._keys.take(connection, task):
                    id = self._keys.lock(connection, task)
                row = (
                    None
                    if id is None
                    else connection.execute(self._moves.get, {"task_id": id}).first()
                )
                found = None if row is None else task_of(row, self._schema)
                return None if found is None or found.is_finished else found

        return self._db.run(look)

    def drop(self, pointer: KeyRow, is_dead: Callable[[], bool]) -> bool:
        """Frees a key that points to another database, if nobody has it there. Who is about to schedule there waits."""

        def work() -> bool:
            with self._db.begin() as connection:
                if self._keys.lock(connection, pointer) != pointer.id or not is_dead():
                    return False
                self._keys.release(connection, pointer)
                return True

        return self._db.run(work)

    def replace(self, owner: DelayTask, task: DelayTask) -> DelayTask | None:
        """What `owner`, a task here, is afterwards; None if it does not wait any more, or has lost the key."""

        def work() -> DelayTask | None:
            with self._db.begin() as connection:
                has_key = self._keys.lock(connection, task) == owner.id
                found = self._moves.locked(connection, owner.id) if has_key else None
                if found is None or found.status not in MOVES["replace"].sources:
                    return None
                return self._replaced(connection, found, task)

        return self._db.run(work, owner.id)


def _defer(task: DelayTask, owner: DelayTask) -> datetime:
    """When the new task in a holder's place is due: whoever replaces again and again puts it off for a while only,
    which begins with the first of them, or with a run that was to be repeated."""
    began = owner.execution_time or owner.create_time
    if task.max_wait_s is None or began is None:
        return task.expected_time
    # As numbers: another program's row may have been made at the end of time.
    return from_us(min(to_us(task.expected_time), to_us(began) + int(task.max_wait_s * 1e6)))
