"""Rows that were put off since no worker had a processor for their tag, or the key of their body, and the worker that
has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, or_, select, update

from delaytasks.core.clock import to_us
from delaytasks.core.encryption import MARK_LENGTH, PREFIX, PREFIXES, marks_of
from delaytasks.core.interfaces import Entry
from delaytasks.core.states import MOVES, Status, following
from delaytasks.core.text import NO_KEY, NO_PROCESSOR, NO_TIME_LIMITS, is_deferred_until
from delaytasks.storage.database import Database
from delaytasks.storage.rows import listing, next_version
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus, once

STEP = 500


class DeferredRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._marks = [] if schema.cipher is None else marks_of(schema.cipher.names)

    def bring_forward(
        self, tags: Sequence[str], queues: Sequence[str] | None, within_s: float
    ) -> list[Entry]:
        """Those of these tags and queues (None: of all) that were put off until an instant within so many seconds are
        due now. Who was rescheduled or touched meanwhile is due when that says."""
        t = self._t
        # `+ 0` keeps planners from reading all rows that wait for the few that are near.
        is_why = or_(
            t.c.error_stack.startswith(NO_PROCESSOR),
            t.c.error_stack.startswith(NO_TIME_LIMITS),
            and_(t.c.error_stack.startswith(NO_KEY), self._is_readable()),
        )
        defer = (t.c.status + 0 == int(Status.NOT_COMPLETE), is_why)
        ours = [t.c.tag.in_(listing("tags"))]
        named = {"tags": list(tags)}
        if queues is not None:
            ours.append(t.c.queue.in_(listing("queues")))
            named["queues"] = list(queues)
        query = (
            select(
                t.c.id,
                t.c.version,
                t.c.expected_time,
                t.c.queue,
                t.c.priority,
                t.c.error_stack,
                t.c.due_time,
            )
            .where(*defer, *ours, t.c.expected_time <= once(db_now_plus(within_s)))
            .order_by(t.c.expected_time)
            .limit(STEP)
            .with_for_update(skip_locked=True)
        )
        values = {
            "status": int(MOVES["reschedule"].target),
            "version": next_version(t.c.version),
            # A touch may have made the task due later than now.
            "expected_time": case((t.c.due_time > db_now(), t.c.due_time), else_=db_now()),
            "update_time": db_now(),
        }
        brought: list[Entry] = []

        def step(since: Any) -> Any:
            """Returns where the next one begins; None at the end."""
            with self._db.begin() as connection:
                rows = connection.execute(query.where(t.c.expected_time > since), named).all()
                rows_deferred = [row for row in rows if is_deferred_until(row[5], row[2])]
                if rows_deferred:
                    ids = [row[0] for row in rows_deferred]
                    connection.execute(
                        update(t).where(t.c.id.in_(ids)).values(values)
                    )  # they are locked
                    now = connection.execute(select(db_now())).scalar_one()
            brought.extend(
                Entry(row[0], following(row[1]), to_us(max(now, row[6] or now)), row[3], row[4])
                for row in rows_deferred
            )
            return rows[-1][2] if len(rows) == STEP else None

        since = self._db.run(lambda: step(once(db_now())))
        while since is not None:
            since = self._db.run(lambda since=since: step(since))  # type: ignore[misc]
        return brought

    def _is_readable(self) -> ColumnElement[bool]:
        """As the body says, and not as the reason did: it may have been rotated since."""
        body = self._t.c.message_body
        is_plain = func.substr(body, 1, len(PREFIX)).not_in(PREFIXES)
        return (
            or_(is_plain, func.substr(body, 1, MARK_LENGTH + 1).in_(self._marks))
            if self._marks
            else is_plain
        )
