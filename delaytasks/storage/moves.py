"""A move of one row by an operator: checked, locked, checked again, and made.

The moves, and the outcomes of runs that lead to moves, are listed in `core/states.py`. Moves that
end runs are made by `storage/settlements.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import bindparam, select, update

from delaytasks.core.errors import (
    CancelTooLateError,
    InvalidStatusError,
    StaleVersionError,
    TaskNotFoundError,
)
from delaytasks.core.states import MOVES, Status, following
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown
from delaytasks.storage.rows import columns, task_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys
from delaytasks.storage.types import db_now


class Moves:
    def __init__(self, schema: Schema, keys: TaskKeys) -> None:
        self._t = t = schema.tasks
        self._schema = schema
        self._keys = keys
        self.get = select(*columns(schema)).where(t.c.id == bindparam("task_id"))

    def take(self, on: Any, name: str, id: int, version: int | None) -> DelayTask:
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

    def locked(self, on: Any, id: int) -> DelayTask | None:
        row = on.execute(self.get.with_for_update(), {"task_id": id}).first()
        return None if row is None else task_of(row, self._schema)

    def make(self, on: Any, name: str, task: DelayTask, values: dict[str, Any]) -> DelayTask:
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


def _check(name: str, task: DelayTask, version: int | None) -> None:
    if version is not None and task.version != version:
        fact = f"task {task.id} has version {task.version}, not {shown(version)}"
        raise StaleVersionError(f"{fact}; read it again", task.id)
    if name == "cancel" and task.status is Status.RUNNING:
        fact = f"task {task.id} ({task.tag}) runs since {task.execution_time}"
        raise CancelTooLateError(fact, task.id, task.status)
    if not (name == "cancel" and task.status is Status.CANCELLED):
        _check_status(name, task)


def _check_status(name: str, task: DelayTask) -> None:
    sources = MOVES[name].sources
    if task.status not in sources:
        allowed = ", ".join(sorted(s.name for s in sources))
        fact = f"{name}: task {task.id} ({task.tag}) is {task.status.name}, not {allowed}"
        raise InvalidStatusError(fact, task.id, task.status)
