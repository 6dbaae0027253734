"""Rows of paused tags and queues: moved out of the index of live rows, and back into it.

The statement that holds rows checks the pause itself. A worker that does not know yet that a pause
has ended holds no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, select, update

from delaytasks.core.body import dump_json
from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Entry, FoundRow, Level
from delaytasks.core.states import MOVES, Status, following
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.policies import is_paused
from delaytasks.storage.queue_levels import has_status, levels_of, queues_after, waits_between
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.row_lists import json_rows, listed
from delaytasks.storage.rows import moved
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import unindexed
from delaytasks.storage.waitlist_names import is_entry_of

#: Rows that one query returns. With many more, planners that expect fewer would sort all later
#: rows.
ROWS_PER_QUERY = 500
#: Queues whose levels one call returns.
QUEUES_PER_CALL = 100


class PausedRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = t = schema.tasks
        waitlist = schema.waitlists
        self._listed = listed(database, t.c.id, "ids")
        # Rows in a waitlist are HELD too, but only the waitlist releases them. This is a scalar
        # subquery for each row, since MariaDB would read the whole waitlist for an EXISTS.
        entry = and_(is_entry_of(waitlist, t.c), waitlist.c.version == t.c.version)
        first = select(waitlist.c.task_id).where(entry).limit(1).correlate(t)
        self._is_not_in_waitlist = first.scalar_subquery().is_(None)
        self._is_paused = is_paused(schema)

    # -- look -------------------------------------------------------------------------------------

    def levels(self, status: Status, after: str | None = None) -> tuple[list[Level], str | None]:
        """Return the levels of the next queues with rows of this status, the highest priority
        first.

        The second value is the `after` of the next call, or None if there are no more queues.
        """
        t = self._t

        def work(connection: Any) -> tuple[list[Level], str | None]:
            queues = queues_after(connection, t, status, after, QUEUES_PER_CALL)
            found = [level for queue in queues for level in levels_of(connection, t, status, queue)]
            found.sort(key=lambda at: (-at.priority, at.queue))
            return found, queues[-1] if len(queues) == QUEUES_PER_CALL else None

        return self._db.autocommitted(work)

    def look(
        self, status: Status, level: Level, since: datetime | None, until: datetime | None
    ) -> list[FoundRow]:
        """Return the first rows of a level, by due time, that are due from `since` until
        `until`."""
        # Without a second sort key, since planners that expect few rows would sort all of them.
        query = self._of(status, level).order_by(self._t.c.expected_time)
        if since is not None:
            query = query.where(self._t.c.expected_time >= since)
        return self._seen(query if until is None else query.where(self._t.c.expected_time <= until))

    def due_at(self, status: Status, level: Level, due: datetime, after: int) -> list[FoundRow]:
        """Return rows that are due at the same instant, by id, since there may be more than one
        query returns."""
        t = self._t
        return self._seen(
            self._of(status, level).where(t.c.expected_time == due, t.c.id > after).order_by(t.c.id)
        )

    def _of(self, status: Status, level: Level) -> Select[Any]:
        t = self._t
        query = select(t.c.id, t.c.tag, t.c.expected_time).where(
            has_status(t, status), t.c.queue == level.queue, t.c.priority == level.priority
        )
        return query.where(self._is_not_in_waitlist) if status is Status.HELD else query

    def _seen(self, query: Select[Any]) -> list[FoundRow]:
        return [FoundRow(*row) for row in self._db.rows(query.limit(ROWS_PER_QUERY))]

    def due_between(self, since: datetime, until: datetime) -> list[int]:
        """Return the ids of some waiting rows due in (since, until] that are paused."""
        t = self._t
        query = select(t.c.id).where(waits_between(t, since, until), self._is_paused)
        query = query.order_by(t.c.expected_time).limit(ROWS_PER_QUERY)
        return [row.id for row in self._db.rows(query)]

    # -- move -------------------------------------------------------------------------------------

    def hold(self, ids: Sequence[int]) -> int:
        """Hold the rows that wait and are paused, and return their number. Skip locked rows."""
        # The pause may end between the two statements. Then the UPDATE meets fewer rows, or none.
        return self._move("hold", ids, self._is_paused)[1]

    def release(self, ids: Sequence[int]) -> list[Entry]:
        """Release the held rows, whatever holds them, and return them as they wait now."""
        return self._move("release", ids)[0]

    def _move(
        self, name: str, ids: Sequence[int], *where: ColumnElement[bool]
    ) -> tuple[list[Entry], int]:
        """Lock the rows and move them. Return the locked rows, and how many were changed."""
        t, move = self._t, MOVES[name]
        named = and_(self._listed, unindexed(t.c.status) == int(move.source), *where)
        pick = (
            select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority)
            .where(named)
            .order_by(t.c.id)
        )
        # Only tasks are locked: rows of a locked policy would be skipped, too.
        locking = pick.with_for_update(
            skip_locked=True, of=t if self._db.can.update_returning else None
        )
        moving = update(t).where(self._listed, *where).values(moved(t, name))

        def work(connection: Any) -> tuple[list[Entry], int]:
            rows = connection.execute(locking, {"ids": ids}).all()
            if not rows:
                return [], 0
            changed: int = connection.execute(moving, {"ids": [row.id for row in rows]}).rowcount
            if not where:
                check_row_count(changed, len(rows), f"rows to {name}")
            entries = [
                Entry(row[0], following(row[1]), to_us(row[2]), row[3], row[4]) for row in rows
            ]
            return entries, changed

        return self._db.transaction(work)

    def hold_claimed(self, tasks: Sequence[DelayTask]) -> set[int]:
        """Hold paused rows that this worker has claimed but not started. Returns the ids of the
        held rows."""
        t, move = self._t, MOVES["hold_back"]
        w = json_rows(self._db, ("id", "version"))
        ordered = sorted(tasks, key=lambda task: task.id)
        ids = [task.id for task in ordered]
        rows = dump_json([{"id": task.id, "version": task.version} for task in ordered])
        mine = and_(
            t.c.id == w.c.id,
            t.c.version == w.c.version,
            unindexed(t.c.status) == int(move.source),
            self._listed,
        )
        # The values of a row that was given back: it never ran.
        values = moved(
            t,
            move.name,
            attempts=t.c.attempts - 1,
            execution_time=None,
            lease_until=None,
            worker=None,
            ip_address=None,
        )
        statement = update(t).where(mine, self._is_paused).values(values)
        after = select(t.c.id, t.c.version).where(
            self._listed, unindexed(t.c.status) == int(move.target)
        )
        versions = {task.id: following(task.version) for task in tasks}

        def work(connection: Any) -> set[int]:
            connection.execute(statement, {"rows": rows, "ids": ids})
            # The rows are read instead of counted: an earlier try, whose answer was lost, may have
            # held them.
            held = connection.execute(after, {"ids": ids})
            return {row[0] for row in held if versions[row[0]] == row[1]}

        return self._db.transaction(work)
