"""Keys name the live task of a tag; a move to and from a live status takes and frees the key.

A key's row is always locked before its task's row. The other order could deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, false, select, update

from delaytasks.db.database import Database
from delaytasks.db.rows import listed
from delaytasks.db.schema import Schema
from delaytasks.db.statements import Insert
from delaytasks.model.task import DelayedTask


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
