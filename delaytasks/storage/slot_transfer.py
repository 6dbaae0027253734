"""A place that goes from a task that has run to the next one in line: one statement, where the database can."""

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

from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.rows import task_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now


class SlotTransfer:
    def __init__(
        self,
        database: Database,
        schema: Schema,
        claimed: Mapping[str, Any],
        columns: list[Column[Any]],
    ) -> None:
        self._schema = schema
        t, line = schema.tasks, schema.lines
        # `+ 0` keeps planners from looking for one row among all that are held.
        waits = and_(
            t.c.id == line.c.task_id,
            t.c.version == line.c.version,
            t.c.status + 0 == int(Status.HELD),
        )
        first = (
            select(*line.c)
            .join(t, waits)
            .where(
                line.c.queue == bindparam("of_queue", type_=String),
                line.c.tag == bindparam("of_tag", type_=String),
            )
            .where(t.c.lapses <= 0, t.c.expected_time <= db_now())
            .order_by(line.c.lane, line.c.place, line.c.due, line.c.task_id)
            .limit(1)
            .with_for_update(skip_locked=True, of=t)
        )

        def taking(query: Any) -> Any:
            picked = query.cte("picked")
            same = and_(
                *(line.c[column.name] == picked.c[column.name] for column in line.primary_key)
            )
            left = delete(line).where(same).cte("gone")
            ids = func.array(select(picked.c.task_id).scalar_subquery())
            return (
                update(t)
                .where(t.c.id == any_(ids))
                .values(claimed)
                .returning(*columns)
                .add_cte(left)
            )

        after = line.c.lane > bindparam("after", type_=String)
        self._first, self._next = (
            Prepared(database, taking(first)),
            Prepared(database, taking(first.where(after))),
        )

    def next(self, on: Connection, queue: str, tag: str, after: str | None) -> DelayTask | None:
        """The first one of the next lane; one that somebody has locked, or that lapsed before, is passed over."""
        where = {"of_queue": queue, "of_tag": tag}
        rows = () if after is None else self._next(on, {**where, "after": after}).rows
        rows = rows or self._first(on, where).rows
        return task_of(rows[0], self._schema) if rows else None
