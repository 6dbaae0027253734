"""Rows of paused tags and queues: out of the index of live rows, and back into it.

Whether something is paused is asked in the statement that holds: who believes in a pause that is over holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, literal_column, select, update

from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Entry, Level, Seen
from delaytasks.core.json_text import dump_json
from delaytasks.core.states import MOVES, Status, following
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.policies import is_paused
from delaytasks.storage.queue_levels import levels_of, queues_after
from delaytasks.storage.rows import json_rows, listed, next_version
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now

#: Rows that one look sees. With many more a planner that expects less would rather sort all that come after.
LOOK = 500
#: Queues whose levels one call returns.
QUEUES = 100


class PausedRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = t = schema.tasks
        line = schema.lines
        self._listed = listed(database, t.c.id, "ids")
        # Who waits in line for a limited tag is held, too, and is not ours to release. Asked for each row by itself:
        # as an EXISTS, MariaDB would read all lines for it.
        place = and_(
            line.c.queue == t.c.queue,
            line.c.tag == t.c.tag,
            line.c.lane == func.coalesce(t.c.concurrency_key, ""),
            line.c.place == -t.c.priority,
            line.c.due == t.c.expected_time,
            line.c.task_id == t.c.id,
            line.c.version == t.c.version,
        )
        self._is_in_no_line = (
            select(line.c.task_id).where(place).limit(1).correlate(t).scalar_subquery().is_(None)
        )
        self._is_paused = is_paused(schema)

    # -- look -------------------------------------------------------------------------------------

    def levels(self, status: Status, after: str | None = None) -> tuple[list[Level], str | None]:
        """Return the levels of the next queues that have rows of this status, the highest priority first.

        The second value is the `after` of the next call, or None if there are no more queues.
        """
        t = self._t

        def work(connection: Any) -> tuple[list[Level], str | None]:
            queues = queues_after(connection, t, status, after, QUEUES)
            found = [level for queue in queues for level in levels_of(connection, t, status, queue)]
            is_last = len(queues) < QUEUES
            return sorted(
                found, key=lambda at: (-at.priority, at.queue)
            ), None if is_last else queues[-1]

        return self._db.alone(work)

    def look(
        self, status: Status, level: Level, since: datetime | None, until: datetime | None
    ) -> list[Seen]:
        """The rows of a level from an instant on, in the order of their due times: so many that one look may see."""
        # Without a second key to order by, or planners that expect few rows would sort all for the first ones.
        query = self._of(status, level).order_by(self._t.c.expected_time)
        if since is not None:
            query = query.where(self._t.c.expected_time >= since)
        return self._seen(query if until is None else query.where(self._t.c.expected_time <= until))

    def crowd(self, status: Status, level: Level, due: datetime, after: int) -> list[Seen]:
        """Those of one instant, in the order of their ids: they may be more than one look sees."""
        t = self._t
        return self._seen(
            self._of(status, level).where(t.c.expected_time == due, t.c.id > after).order_by(t.c.id)
        )

    def _of(self, status: Status, level: Level) -> Select[Any]:
        t = self._t
        # Written out: what comes as a parameter may be planned without the index of these rows alone.
        here = t.c.status == literal_column(str(int(status)))
        columns = (t.c.id, t.c.tag, t.c.expected_time)
        query = select(*columns).where(
            here, t.c.queue == level.queue, t.c.priority == level.priority
        )
        return query.where(self._is_in_no_line) if status is Status.HELD else query

    def _seen(self, query: Select[Any]) -> list[Seen]:
        return self._db.alone(lambda c: [Seen(*row) for row in c.execute(query.limit(LOOK))])

    def near(self, since: datetime, until: datetime) -> list[int]:
        """Some of those that wait and are due in (since, until], and are paused."""
        t = self._t
        query = (
            select(t.c.id)
            # `+ 0` keeps planners from reading all rows that wait for the few that are near.
            .where(
                t.c.status + 0 == int(Status.NOT_COMPLETE),
                t.c.expected_time > since,
                t.c.expected_time <= until,
            )
            .where(self._is_paused)
            .order_by(t.c.expected_time)
            .limit(LOOK)
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
        # `+ 0` keeps planners from reading all that is held, or all that waits.
        named = and_(self._listed, t.c.status + 0 == int(source), *where)
        pick = (
            select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority)
            .where(named)
            .order_by(t.c.id)
        )
        # Of the tasks only: a policy that is locked would be passed over, too.
        locking = pick.with_for_update(
            skip_locked=True, of=t if self._db.can.update_returning else None
        )
        values = {
            "status": int(move.target),
            "version": next_version(t.c.version),
            "update_time": db_now(),
        }
        moving = update(t).where(self._listed, *where).values(values)

        def work() -> list[Entry]:
            with self._db.begin() as connection:
                rows = connection.execute(locking, {"ids": ids}).all()
                if rows:
                    connection.execute(moving, {"ids": [row.id for row in rows]})
                return [
                    Entry(row[0], following(row[1]), to_us(row[2]), row[3], row[4]) for row in rows
                ]

        return self._db.run(work)

    def hold_claimed(self, tasks: Sequence[DelayTask]) -> set[int]:
        """Of those that this worker has claimed and not begun; returns the ids of those that are held now."""
        t, move = self._t, MOVES["hold_back"]
        w = json_rows(self._db.url.get_backend_name(), ("id", "version"))
        ordered = sorted(tasks, key=lambda task: task.id)
        ids = [task.id for task in ordered]
        rows = dump_json([{"id": task.id, "version": task.version} for task in ordered])
        [source] = move.sources
        mine = and_(
            t.c.id == w.c.id,
            t.c.version == w.c.version,
            t.c.status + 0 == int(source),
            self._listed,
        )
        # As given back: it never ran, and nobody did it anywhere.
        values: dict[str, Any] = {
            "status": int(move.target),
            "version": next_version(t.c.version),
            "attempts": t.c.attempts - 1,
            "execution_time": None,
            "lease_until": None,
            "worker": None,
            "ip_address": None,
            "update_time": db_now(),
        }
        statement = update(t).where(mine, self._is_paused).values(values)
        after = select(t.c.id, t.c.version).where(self._listed, t.c.status + 0 == int(move.target))
        versions = {task.id: following(task.version) for task in tasks}

        def work() -> set[int]:
            with self._db.begin() as connection:
                connection.execute(statement, {"rows": rows, "ids": ids})
                # Also those of an earlier try, whose answer was lost.
                return {
                    row[0]
                    for row in connection.execute(after, {"ids": ids})
                    if versions[row[0]] == row[1]
                }

        return self._db.run(work)
