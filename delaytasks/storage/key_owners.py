"""Decides which task owns a key: takes, keeps, replaces or passes on the key that another task
wants.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from delaytasks.core.clock import from_us, to_us
from delaytasks.core.errors import DuplicateTaskError, StoreUnavailableError
from delaytasks.core.states import MOVES, following
from delaytasks.core.task import DelayTask, OnConflict
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import TRIES
from delaytasks.storage.moves import Moves
from delaytasks.storage.rows import values_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys


def _changed_too_often(task: DelayTask) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"key {task.key!r} of tag {task.tag!r} changed its owner {TRIES} times; try again"
    )


class KeyOwners:
    def __init__(self, database: Database, schema: Schema, keys: TaskKeys, moves: Moves) -> None:
        self._db = database
        self._schema = schema
        self._keys = keys
        self._moves = moves

    def take(self, on: Any, task: DelayTask, on_conflict: OnConflict) -> tuple[DelayTask, bool]:
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
        raise _changed_too_often(task)

    def _take_over(self, on: Any, task: DelayTask) -> tuple[DelayTask, bool]:
        if not self._keys.pass_to(on, task):
            # This happens only if each statement is a transaction, so that no lock lasts.
            raise _changed_too_often(task)
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
        return replace(task, version=version, create_time=owner.create_time)


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
