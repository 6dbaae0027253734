"""Rows of paused tags and queues: out of the index of live rows, and back into it.

Whether something is paused is asked in the statement that holds: who believes in a pause that is over holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, literal_column, or_, select, update

from delaytasks.core.clock import to_us
from delaytasks.core.policies import Policies
from delaytasks.core.ports import Entry, Level, Seen
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import DelayTask
from delaytasks.store.database import Database
from delaytasks.store.levels import levels
from delaytasks.store.rows import dump_rows, json_rows
from delaytasks.store.schema import Schema
from delaytasks.store.types import db_now

#: Rows that one look sees, and that one transaction moves.
LOOK, STEP = 2000, 500


class Holding:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = t = schema.tasks
        p = schema.policies
        of_tag = and_(p.c.kind == "tag", p.c.name == t.c.tag)
        of_queue = and_(p.c.kind == "queue", p.c.name == t.c.queue)
        self._is_paused = exists().where(p.c.is_paused, or_(of_tag, of_queue))

    # -- look -------------------------------------------------------------------------------------

    def levels(self, status: Status) -> list[Level]:
        """The queues and priorities that have rows of this status, the highest priority first."""
        return self._db.alone(lambda c: sorted(levels(c, self._t, status), key=lambda at: (-at.priority, at.queue)))

    def look(self, status: Status, level: Level, after: Seen | None, until: datetime | None) -> list[Seen]:
        """The next rows of a level, in the order of their due times."""
        t = self._t
        query = select(t.c.id, t.c.tag, t.c.expected_time).where(
            # Written out: what comes as a parameter may be planned without the index of these rows alone.
            t.c.status == literal_column(str(int(status))),
            t.c.queue == level.queue,
            t.c.priority == level.priority,
        )
        if after is not None:
            beyond = or_(t.c.expected_time > after.due, t.c.id > after.id)
            query = query.where(t.c.expected_time >= after.due, beyond)
        if until is not None:
            query = query.where(t.c.expected_time <= until)
        query = query.order_by(t.c.expected_time, t.c.id).limit(LOOK)
        return self._db.alone(lambda c: [Seen(*row) for row in c.execute(query)])

    def near(self, policies: Policies, since: datetime, until: datetime) -> list[int]:
        """Some of those that wait and are due in (since, until], and are paused."""
        t = self._t
        query = (
            select(t.c.id)
            # `+ 0` keeps planners from reading all rows that wait for the few that are near.
            .where(t.c.status + 0 == int(Status.NOT_COMPLETE), t.c.expected_time > since, t.c.expected_time <= until)
            .where(or_(t.c.tag.in_(policies.paused_tags), t.c.queue.in_(policies.paused_queues)))
            .order_by(t.c.expected_time)
            .limit(STEP)
        )
        return self._db.alone(lambda c: list(c.execute(query).scalars()))

    # -- move -------------------------------------------------------------------------------------

    def hold(self, ids: Sequence[int]) -> int:
        """Of those that wait and are paused; returns how many they were. What somebody has locked is passed over."""
        return len(self._move("hold", ids, self._is_paused))

    def release(self, ids: Sequence[int]) -> list[Entry]:
        """Of those that are held, whatever holds them; returns them as they wait now."""
        return self._move("release", ids)

    def _move(self, name: str, ids: Sequence[int], *where: ColumnElement[bool]) -> list[Entry]:
        t, move = self._t, MOVES[name]
        [source] = move.sources
        named = and_(t.c.id.in_(ids), t.c.status + 0 == int(source), *where)
        pick = select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority).where(named).order_by(t.c.id)
        # Of the tasks only: a policy that is locked would be passed over, too.
        locking = pick.with_for_update(skip_locked=True, of=t if self._db.can.update_returning else None)
        values = {"status": int(move.target), "version": t.c.version + 1, "update_time": db_now()}

        def work() -> list[Entry]:
            with self._db.begin() as connection:
                rows = connection.execute(locking).all()
                if rows:
                    picked = t.c.id.in_([row.id for row in rows])
                    connection.execute(update(t).where(picked, *where).values(values))
                return [Entry(row[0], row[1] + 1, to_us(row[2]), row[3], row[4]) for row in rows]

        return self._db.run(work)

    def hold_claimed(self, tasks: Sequence[DelayTask]) -> set[int]:
        """Of those that this worker has claimed and not begun; returns the ids of those that are held now."""
        t, move = self._t, MOVES["hold_back"]
        w = json_rows(self._db.url.get_backend_name(), ("id", "version"))
        ordered = sorted(tasks, key=lambda task: task.id)
        ids = [task.id for task in ordered]
        rows = dump_rows([{"id": task.id, "version": task.version} for task in ordered])
        [source] = move.sources
        mine = and_(t.c.id == w.c.id, t.c.version == w.c.version, t.c.status == int(source), t.c.id.in_(ids))
        # As given back: it never ran, and nobody did it anywhere.
        values: dict[str, Any] = {
            "status": int(move.target),
            "version": t.c.version + 1,
            "attempts": t.c.attempts - 1,
            "execution_time": None,
            "lease_until": None,
            "worker": None,
            "ip_address": None,
            "update_time": db_now(),
        }
        statement = update(t).where(mine, self._is_paused).values(values)
        after = select(t.c.id, t.c.version).where(t.c.id.in_(ids), t.c.status == int(move.target))
        versions = {task.id: task.version + 1 for task in tasks}

        def work() -> set[int]:
            with self._db.begin() as connection:
                connection.execute(statement, {"rows": rows})
                # Also those of an earlier try, whose answer was lost.
                return {row[0] for row in connection.execute(after) if versions[row[0]] == row[1]}

        return self._db.run(work)
