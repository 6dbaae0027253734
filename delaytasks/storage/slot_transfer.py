"""The slot transfer: one statement gives a settled task's slot to the next waiting one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    String,
    and_,
    any_,
    bindparam,
    delete,
    func,
    select,
    update,
)

from delaytasks.core.states import MOVES
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.rows import task_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now


class SlotTransfer:
    """For databases with array parameters; `admitted` holds the new values of an admitted row."""

    def __init__(
        self,
        database: Database,
        schema: Schema,
        admitted: Mapping[str, Any],
        columns: list[Column[Any]],
    ) -> None:
        self._schema = schema
        t, entry = schema.tasks, schema.lines
        # `+ 0` keeps planners from looking for one row among all that are held.
        waits = and_(
            t.c.id == entry.c.task_id,
            t.c.version == entry.c.version,
            t.c.status + 0 == int(MOVES["admit"].source),
        )
        first = (
            select(*entry.c)
            .join(t, waits)
            .where(
                entry.c.queue == bindparam("of_queue", type_=String),
                entry.c.tag == bindparam("of_tag", type_=String),
            )
            .where(t.c.lapses <= 0, t.c.expected_time <= db_now())
            .order_by(entry.c.lane, entry.c.place, entry.c.due, entry.c.task_id)
            .limit(1)
            .with_for_update(skip_locked=True, of=t)
        )

        def admit(query: Any) -> Prepared:
            picked = query.cte("picked")
            same = and_(
                *(entry.c[column.name] == picked.c[column.name] for column in entry.primary_key)
            )
            removed = delete(entry).where(same).cte("gone")
            ids = func.array(select(picked.c.task_id).scalar_subquery())
            statement = update(t).where(t.c.id == any_(ids)).values(admitted)
            return Prepared(database, statement.returning(*columns).add_cte(removed))

        after = entry.c.lane > bindparam("after", type_=String)
        self._admit_first, self._admit_next = admit(first), admit(first.where(after))

    def admit(self, on: Connection, queue: str, tag: str, after: str | None) -> DelayTask | None:
        """Admit the first row of the key after `after`, except locked and recovered rows."""
        where = {"of_queue": queue, "of_tag": tag}
        rows = () if after is None else self._admit_next(on, {**where, "after": after}).rows
        rows = rows or self._admit_first(on, where).rows
        return task_of(rows[0], self._schema) if rows else None
