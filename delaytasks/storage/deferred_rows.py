"""Rows that were deferred because no worker had a processor for their tag, or the key of their
body.

A worker that has the processor or the key brings them forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select, update

from delaytasks.core.body import MARK_LENGTH, PREFIX, marks_of
from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Entry
from delaytasks.core.states import Status, following
from delaytasks.core.text import NO_KEY, NO_PROCESSOR, NO_TIME_LIMITS, is_deferred_until
from delaytasks.storage.database import Database
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.row_lists import listing
from delaytasks.storage.rows import moved
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus, once, unindexed

DEFERRED_BATCH_ROWS = 500


class DeferredRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._marks = [] if schema.cipher is None else marks_of(schema.cipher.names)

    def bring_forward(
        self, tags: Sequence[str], queues: Sequence[str] | None, within_s: float
    ) -> list[Entry]:
        """Make deferred rows of these tags and queues due now, and return them.

        Rows that are next tried within `within_s` seconds are considered. `queues` is None for all
        queues. A row that was rescheduled or touched meanwhile keeps the due time of that call.
        """
        t = self._t
        query, parameters = self._deferred(tags, queues, within_s)
        # A touch may have made the task due later than now.
        due = case((t.c.due_time > db_now(), t.c.due_time), else_=db_now())
        values = moved(t, "reschedule", expected_time=due)
        brought: list[Entry] = []

        def step(connection: Any, since: Any) -> tuple[list[Entry], Any]:
            """Bring a batch forward. Return its entries, and where the next one starts."""
            rows = connection.execute(query.where(t.c.expected_time > since), parameters).all()
            deferred = [row for row in rows if is_deferred_until(row[5], row[2])]
            if deferred:
                ids = t.c.id.in_([row[0] for row in deferred])
                changed = connection.execute(update(t).where(ids).values(values)).rowcount
                check_row_count(changed, len(deferred), "deferred rows")
                now = connection.execute(select(db_now())).scalar_one()
            entries = [
                Entry(row[0], following(row[1]), to_us(max(now, row[6] or now)), row[3], row[4])
                for row in deferred
            ]
            return entries, rows[-1][2] if len(rows) == DEFERRED_BATCH_ROWS else None

        since: Any = once(db_now())
        while since is not None:
            entries, since = self._db.transaction(partial(step, since=since))
            brought += entries
        return brought

    def _deferred(
        self, tags: Sequence[str], queues: Sequence[str] | None, within_s: float
    ) -> tuple[Select[Any], dict[str, Any]]:
        """Return the query of a batch of deferred rows, in the order of their tries."""
        t = self._t
        is_why = or_(
            t.c.error_stack.startswith(NO_PROCESSOR),
            t.c.error_stack.startswith(NO_TIME_LIMITS),
            and_(t.c.error_stack.startswith(NO_KEY), self._is_readable()),
        )
        is_deferred = (unindexed(t.c.status) == int(Status.NOT_COMPLETE), is_why)
        conditions = [t.c.tag.in_(listing("tags"))]
        parameters: dict[str, Any] = {"tags": list(tags)}
        if queues is not None:
            conditions.append(t.c.queue.in_(listing("queues")))
            parameters["queues"] = list(queues)
        names = "id version expected_time queue priority error_stack due_time"
        query = (
            select(*(t.c[name] for name in names.split()))
            .where(*is_deferred, *conditions, t.c.expected_time <= once(db_now_plus(within_s)))
            .order_by(t.c.expected_time)
            .limit(DEFERRED_BATCH_ROWS)
            .with_for_update(skip_locked=True)
        )
        return query, parameters

    def _is_readable(self) -> ColumnElement[bool]:
        """Whether this process has the key that the body names now: it may have changed since the
        deferral."""
        body = self._t.c.message_body
        is_plain = func.substr(body, 1, len(PREFIX)) != PREFIX
        if not self._marks:
            return is_plain
        return or_(is_plain, func.substr(body, 1, MARK_LENGTH + 1).in_(self._marks))
