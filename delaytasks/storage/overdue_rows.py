"""Finds the overdue tasks. This is the only definition of the word in SQL.

A waiting task is overdue if it is late by more than the grace period. A task that a worker has
deferred keeps its due time in `due_time`, while its next try is at `expected_time`. It is overdue,
too, although no sweep and no claim look for it yet. A deferral is not longer than `DEFER_MAX_S`,
which bounds the rows to read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from itertools import islice
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, func, null, select

from delaytasks.core.interfaces import OverdueGroup
from delaytasks.core.states import Status
from delaytasks.core.text import DEFER_MAX_S, DEFERRALS
from delaytasks.storage.database import Database
from delaytasks.storage.queue_levels import has_status, levels_of, steps
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now_plus, is_narrow, is_past, once

#: Rows that one call counts. A larger number is a minimum.
MAX_OVERDUE_COUNTED = 1_000_000
#: Queues in which overdue tasks are counted, and priorities of each.
MAX_OVERDUE_QUEUES = 1_000
#: Queues that are compared with those that workers serve.
MAX_OTHER_QUEUES = 20


class OverdueCount(NamedTuple):
    """Tasks that should have begun."""

    tasks: int
    oldest: datetime | None


class OverdueRows:
    """Reads the overdue tasks of one database."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks

    def count(self, late_s: float, most: int = MAX_OVERDUE_COUNTED) -> OverdueCount:
        """Count up to `most` tasks that are late by more than `late_s`."""
        return self._db.autocommitted(lambda c: self.count_on(c, late_s, most))

    def count_on(
        self,
        on: Connection,
        late_s: float,
        most: int,
        most_queues: int = MAX_OVERDUE_QUEUES,
    ) -> OverdueCount:
        """Count on a connection, in at most `most_queues` queues."""
        total, oldest = 0, list[datetime]()
        waits = has_status(self._t, Status.NOT_COMPLETE)
        for queue in islice(steps(on, self._t.c.queue, waits), most_queues):
            for tasks, first in self._of_levels(on, queue, late_s, most - total):
                total += tasks
                oldest.append(first)
        for tasks, first in self._deferred(on, late_s, most).values():
            total += tasks
            oldest.append(first)
        return OverdueCount(min(total, most), min(oldest, default=None))

    def count_of_queues(
        self, on: Connection, queues: list[str], late_s: float, most: int
    ) -> dict[str, OverdueCount]:
        """Count up to `most` overdue tasks of each of these queues, with the oldest of them."""
        deferred, found = self._deferred(on, late_s, most), dict[str, OverdueCount]()
        for queue in queues:
            parts = list(self._of_levels(on, queue, late_s, most))
            if queue in deferred:
                parts.append(deferred[queue])
            tasks = min(sum(tasks for tasks, _ in parts), most)
            found[queue] = OverdueCount(tasks, min((first for _, first in parts), default=None))
        return found

    def other_queues(self, known: Collection[str], late_s: float) -> list[str]:
        """Return queues with tasks that are late by more than `late_s`, except those in `known`.

        At most `MAX_OTHER_QUEUES` other queues are looked at, the first ones by name.
        """

        def read(on: Connection) -> list[str]:
            queues = steps(on, self._t.c.queue, has_status(self._t, Status.NOT_COMPLETE))
            others = islice((queue for queue in queues if queue not in known), MAX_OTHER_QUEUES)
            found = self.count_of_queues(on, list(others), late_s, most=1)
            return [queue for queue, late in found.items() if late.tasks]

        return self._db.autocommitted(read)

    def _of_levels(
        self, on: Connection, queue: str, late_s: float, most: int
    ) -> Iterator[tuple[int, datetime]]:
        """Yield the number and the first due time of the late tasks of each priority.

        The index has the due times in order within a queue and a priority. Without them, all
        waiting rows would be read.
        """
        t, status = self._t, Status.NOT_COMPLETE
        for level in levels_of(on, t, status, queue):
            if most <= 0:
                return
            late = (
                select(self._due.label("due"))
                .where(
                    has_status(t, status),
                    is_narrow(t.c.queue, queue),
                    t.c.priority == level.priority,
                    is_past(t.c.expected_time, db_now_plus(-late_s)),
                )
                .order_by(t.c.expected_time)
                .limit(most)
                .subquery()
            )
            tasks, first = on.execute(select(func.count(), func.min(late.c.due))).one()
            if tasks:
                yield tasks, first
            most -= tasks

    def _deferred(
        self, on: Connection, late_s: float, most: int
    ) -> dict[str, tuple[int, datetime]]:
        """Return the number and the first due time of the late tasks whose next try is not late, by
        queue.

        Up to `most` tasks with their next try within the longest deferral are read.
        """
        t = self._t.c
        near = (
            select(t.queue, t.due_time)
            .where(self._is_tried_soon(late_s))
            .order_by(t.expected_time)
            .limit(most)
            .subquery()
        )
        query = (
            select(near.c.queue, func.count(), func.min(near.c.due_time))
            .where(near.c.due_time <= once(db_now_plus(-late_s)))
            .group_by(near.c.queue)
        )
        return {queue: (tasks, first) for queue, tasks, first in on.execute(query)}

    def _is_tried_soon(self, late_s: float) -> ColumnElement[bool]:
        t = self._t.c
        return and_(
            has_status(self._t, Status.NOT_COMPLETE),
            t.expected_time > once(db_now_plus(-late_s)),
            t.expected_time <= once(db_now_plus(DEFER_MAX_S)),
        )

    @property
    def _due(self) -> ColumnElement[datetime]:
        return func.coalesce(self._t.c.due_time, self._t.c.expected_time)

    def deferred(self, late_s: float) -> ColumnElement[bool]:
        """Return the condition for late tasks whose next try is not late."""
        is_late = self._t.c.due_time <= once(db_now_plus(-late_s))
        return and_(self._is_tried_soon(late_s), is_late)

    def groups(self, late_s: float, most: int) -> list[OverdueGroup]:
        """Return the largest groups of overdue tasks, by queue, tag and cause of the deferral."""
        t, found = self._t, list[OverdueGroup]()
        is_late = and_(
            has_status(t, Status.NOT_COMPLETE), is_past(t.c.expected_time, db_now_plus(-late_s))
        )
        codes = [(t.c.error_stack.startswith(begin), code) for begin, code in DEFERRALS.items()]
        cause = case(*codes, else_="deferred")
        for where, why in ((is_late, null()), (self.deferred(late_s), cause)):
            tasks = func.count().label("tasks")
            rows = select(t.c.queue, t.c.tag, why.label("cause"), self._due.label("due"))
            c = rows.where(where).subquery().c
            query = select(c.queue, c.tag, c.cause, tasks, func.min(c.due))
            query = query.group_by(c.queue, c.tag, c.cause).order_by(tasks.desc()).limit(most)
            found += [OverdueGroup(*row) for row in self._db.rows(query)]
        return sorted(found, key=lambda group: -group.tasks)[:most]
