"""Keys name the live task of a tag; a move to and from a live status takes and frees the key.

A key's row is always locked before its task's row. The other order could deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, false, select, update

from delaytasks.db.database import Database
from delaytasks.db.driver_errors import TRIES
from delaytasks.db.inserts import Insert
from delaytasks.db.row_lists import listed
from delaytasks.db.rows import columns, task_of, values_of
from delaytasks.db.schema import Schema
from delaytasks.db.types import db_now
from delaytasks.model.clock import from_us, to_us
from delaytasks.model.errors import (
    DuplicateTaskError,
    StaleVersionError,
    StoreUnavailableError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.model.moves import MOVES, Status, following
from delaytasks.model.task import DelayedTask, OnConflict
from delaytasks.model.text import shown


class TaskKeys:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._k = k = schema.keys
        self._insert = Insert(database, k, ("tag", "task_key", "task_id"))
        self._of = select(k.c.task_id).where(
            k.c.tag == bindparam("tag"), k.c.task_key == bindparam("task_key")
        )
        named = and_(k.c.tag == bindparam("tag"), listed(database, k.c.task_key, "task_keys"))
        self._of_many = select(k.c.task_key, k.c.task_id).where(named)

    def id_of(self, on: Any, tag: str, key: str | None, is_locked: bool = False) -> int | None:
        query = self._of.with_for_update() if is_locked else self._of
        found: int | None = on.execute(query, {"tag": tag, "task_key": key}).scalar()
        return found

    def ids_of(self, on: Any, tag: str, keys: Sequence[str]) -> dict[str, int]:
        """Return the owners of the keys that are taken, by key."""
        return dict(on.execute(self._of_many, {"tag": tag, "task_keys": keys}).all())

    def lock(self, on: Any, task: DelayedTask) -> int | None:
        """Return the id that owns the task's key, which stays so until the end of the
        transaction."""
        return self.id_of(on, task.tag, task.key, is_locked=True)

    def take(self, on: Any, task: DelayedTask) -> bool:
        """Insert the key. Returns True if it was free."""
        return self._insert(on, {"tag": task.tag, "task_key": task.key, "task_id": task.id})

    def pass_to(self, on: Any, task: DelayedTask) -> bool:
        """Give a key that exists to this task. Returns False if it does not exist."""
        passing = update(self._k).where(self._named(task)).values(task_id=task.id)
        return bool(on.execute(passing).rowcount)

    def release(self, on: Any, task: DelayedTask) -> None:
        """Delete the key unless it names another task now."""
        if task.key is not None:
            on.execute(delete(self._k).where(self._named(task), self._k.c.task_id == task.id))

    def lock_all(self, on: Any, tasks: Sequence[Any], skip_locked: bool = True) -> list[Any]:
        """Lock the keys, and return the (id, tag, key) of `tasks` that still own theirs.

        With `skip_locked`, keys that another transaction has locked are left out."""
        return self._owners(on, tasks, lambda q: q.with_for_update(skip_locked=skip_locked))

    def owned(self, on: Any, tasks: Sequence[Any]) -> list[Any]:
        """Return the (id, tag, key) of `tasks` that own their key, whether it is locked or not."""
        return self._owners(on, tasks, lambda q: q)

    def _owners(
        self, on: Any, tasks: Sequence[Any], locked: Callable[[Select[Any]], Select[Any]]
    ) -> list[Any]:
        if not tasks:
            return []
        k = self._k.c
        query = select(k.task_id).where(self._named_all(tasks)).order_by(k.task_key, k.tag)
        owners = set(on.execute(locked(query)).scalars())
        return [task for task in tasks if task[0] in owners]

    def release_all(self, on: Any, tasks: Sequence[Any]) -> None:
        if tasks:
            on.execute(delete(self._k).where(self._named_all(tasks)))

    def _named_all(self, tasks: Sequence[Any]) -> ColumnElement[bool]:
        ids, tags, keys = ({task[part] for task in tasks} for part in range(3))
        # The key and the tag are named too, since there is no index on ids.
        return and_(
            self._k.c.task_key.in_(keys), self._k.c.tag.in_(tags), self._k.c.task_id.in_(ids)
        )

    def write_nothing(self, on: Any) -> None:
        """Execute a statement that writes, so that SQLite's driver begins a transaction."""
        on.execute(delete(self._k).where(false()))

    def _named(self, task: DelayedTask) -> ColumnElement[bool]:
        return and_(self._k.c.tag == task.tag, self._k.c.task_key == task.key)


# -- A move of one row by an operator: checked, locked, checked again, and made -------------------

# The moves, and the outcomes of runs that lead to moves, are listed in `model/moves.py`. Moves
# that end runs are made by `db/settlements.py`.


class Moves:
    def __init__(self, schema: Schema, keys: TaskKeys) -> None:
        self._t = t = schema.tasks
        self._schema = schema
        self._keys = keys
        self.get = select(*columns(schema)).where(t.c.id == bindparam("task_id"))

    def take(self, on: Any, name: str, id: int, version: int | None) -> DelayedTask:
        """Return the task, locked for this move.

        A move that is not allowed is refused without a lock: a caller whose transaction stays open
        would keep the lock, and the worker that runs the row could not settle it. `cancel` returns
        a task that is cancelled already, unlocked.
        """
        row = on.execute(self.get, {"task_id": id}).first()
        seen = None if row is None else task_of(row, self._schema)
        # A transaction that reads as of its start (MySQL's default) may see an older version than
        # `version`.
        if seen is not None and not (isinstance(version, int) and seen.version < version):
            _check(name, seen, version)
            if name == "cancel" and seen.status is Status.CANCELLED:
                return seen
        if seen is not None and seen.key is not None and name != "reschedule":
            self._keys.lock(on, seen)
        task = self.locked(on, id)
        if task is None:
            raise TaskNotFoundError(f"there is no task {id}", id)
        _check(name, task, version)
        return task

    def locked(self, on: Any, id: int) -> DelayedTask | None:
        row = on.execute(self.get.with_for_update(), {"task_id": id}).first()
        return None if row is None else task_of(row, self._schema)

    def make(self, on: Any, name: str, task: DelayedTask, values: dict[str, Any]) -> DelayedTask:
        """Update the row, fenced by the version that was read."""
        move, t = MOVES[name], self._t
        _check_status(name, task)
        if "expected_time" in values:
            values = {**values, "due_time": None}  # expected_time is the due time again
        values = {
            **values,
            "cancel_request": None,  # it was for an earlier run
            "status": int(move.target),
            "version": following(task.version),
            "update_time": db_now(),
        }
        result = on.execute(
            update(t).where(t.c.id == task.id, t.c.version == task.version).values(**values)
        )
        if not result.rowcount:
            raise StaleVersionError(
                f"{name}: task {task.id} moved on from version {task.version} meanwhile", task.id
            )
        return replace(
            task,
            status=move.target,
            version=following(task.version),
            expected_time=values.get("expected_time", task.expected_time),
            due_time=values.get("due_time", task.due_time),
        )


def _check(name: str, task: DelayedTask, version: int | None) -> None:
    if version is not None and task.version != version:
        fact = f"task {task.id} has version {task.version}, not {shown(version)}"
        raise StaleVersionError(f"{fact}; read it again", task.id)
    if name == "cancel" and task.status is Status.RUNNING:
        fact = f"task {task.id} ({task.tag}) runs since {task.execution_time}"
        raise TaskStateError(fact, task.id, task.status)
    if not (name == "cancel" and task.status is Status.CANCELLED):
        _check_status(name, task)


def _check_status(name: str, task: DelayedTask) -> None:
    sources = MOVES[name].sources
    if task.status not in sources:
        allowed = ", ".join(sorted(s.name for s in sources))
        fact = f"{name}: task {task.id} ({task.tag}) is {task.status.name}, not {allowed}"
        raise TaskStateError(fact, task.id, task.status)


# -- key owners -----------------------------------------------------------------------------------

# Decides which task owns a key: takes, keeps, replaces or passes on the key that another task
# wants.


def _changed_too_often(task: DelayedTask) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"key {task.key!r} of tag {task.tag!r} changed its owner {TRIES} times; try again"
    )


class KeyOwners:
    def __init__(self, database: Database, schema: Schema, keys: TaskKeys, moves: Moves) -> None:
        self._db = database
        self._schema = schema
        self._keys = keys
        self._moves = moves

    def take(self, on: Any, task: DelayedTask, on_conflict: OnConflict) -> tuple[DelayedTask, bool]:
        """Return the task that owns the key afterwards, and whether the key or the row is new.

        If the owner is `task` itself, its row has yet to be written.
        """
        owner_id = self._take_or_lock(on, task)
        if owner_id is None:
            return task, True
        owner = self._moves.locked(on, owner_id)
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
        return self._replaced(on, owner, task), True

    def _take_or_lock(self, on: Any, task: DelayedTask) -> int | None:
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
        raise _changed_too_often(task)

    def _take_over(self, on: Any, task: DelayedTask) -> tuple[DelayedTask, bool]:
        if not self._keys.pass_to(on, task):
            # This happens only if each statement is a transaction, so that no lock lasts.
            raise _changed_too_often(task)
        return task, True

    def _replaced(self, on: Any, owner: DelayedTask, task: DelayedTask) -> DelayedTask:
        # The row keeps its id, to which the encryption of the new body is bound.
        task = replace(task, id=owner.id, expected_time=_due_of_replacement(task, owner))
        values = values_of(task, self._schema)
        values.pop("create_time")
        self._moves.make(
            on, "replace", owner, {**values, "runs": 0, "lapses": 0, "error_stack": None}
        )
        version = following(owner.version)
        return replace(task, version=version, create_time=owner.create_time)


def _due_of_replacement(task: DelayedTask, owner: DelayedTask) -> datetime:
    """Return when the task that replaces `owner` is due.

    Repeated replacements can defer a task by at most `max_wait_s` after the first of them was
    created, or after the last run of a task that is to run again.
    """
    began = owner.execution_time or owner.create_time
    if task.max_wait_s is None or began is None:
        return task.expected_time
    # Computed with numbers, since another program's row may have been created at the end of time.
    return from_us(min(to_us(task.expected_time), to_us(began) + int(task.max_wait_s * 1e6)))
