"""Whose turn it is in a line: keys take turns, and those of one key come by priority and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, delete, select, tuple_, update

from delaytasks.core.capacity import Room
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.rows import listed, listing, next_version
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now

#: Rows that are looked at beyond those that are wanted, since somebody may have locked the first ones.
BEYOND = 20
#: Of the ids and versions of held rows, those that could be taken.
Take = Callable[[Any, Sequence[tuple[int, int]]], list[DelayTask]]


class Next(NamedTuple):
    tasks: list[DelayTask]
    #: The lane of the last one.
    turn: str | None


class _Left(NamedTuple):
    tasks: list[DelayTask]
    #: How many others did not wait there any more.
    others: int
    #: It is one that lapsed before, which runs by itself.
    is_alone: bool


class FairOrder:
    def __init__(self, database: Database, schema: Schema, take: Take) -> None:
        self._take = take
        t, line, held = schema.tasks, schema.lines, int(Status.HELD)
        place = (line.c.lane, line.c.place, line.c.due, line.c.task_id, line.c.version)
        named = listed(database, t.c.id, "ids")
        waiting, version = int(MOVES["release"].target), next_version(t.c.version)
        release = {"status": waiting, "version": version, "update_time": db_now()}
        self._release = update(t).values(release).where(named)
        # Not one whose transaction may still push it further away: it waits for nobody.
        free = select(t.c.id).where(named, t.c.status + 0 == held).with_for_update(skip_locked=True)
        self._pick_free = free
        # `+ 0` keeps planners from looking for one row among all that are held.
        waits = and_(
            t.c.id == line.c.task_id, t.c.version == line.c.version, t.c.status + 0 == held
        )
        in_line = and_(line.c.queue == bindparam("queue"), line.c.tag == bindparam("tag"))
        is_gone, is_later = (
            t.c.id.is_(None).label("is_gone"),
            (t.c.expected_time > db_now()).label("is_later"),
        )
        first = (
            select(*place, is_gone, is_later, t.c.lapses)
            .select_from(line.outerjoin(t, waits))
            .where(in_line)
            .order_by(line.c.lane, line.c.place, line.c.due, line.c.task_id)
            .limit(bindparam("most"))
        )
        self._first = first.where(line.c.lane == bindparam("lane"))
        self._delete = delete(line).where(in_line, tuple_(*place).in_(listing("places")))
        lanes = select(line.c.lane).where(in_line).order_by(line.c.lane).limit(1)
        # By whether there was a turn before, and whether some keys have all that they may have.
        after, others = line.c.lane > bindparam("after"), line.c.lane.not_in(listing("full"))
        conditions: dict[tuple[bool, bool], list[Any]] = {
            (False, False): [],
            (False, True): [others],
            (True, False): [after],
            (True, True): [after, others],
        }
        self._next_lane = {which: lanes.where(*some) for which, some in conditions.items()}
        self._first_lane = {which: first.where(*some) for which, some in conditions.items()}

    def next(self, on: Any, queue: str, tag: str, share: int, room: Room, turn: str | None) -> Next:
        """So many, who leave the line and run now; `turn` is the lane of the last one before."""
        if share <= 0:
            return Next([], turn)
        where = {"queue": queue, "tag": tag, "full": room.full_keys}
        return (
            self._one(on, where, turn) if share == 1 else self._some(on, where, share, room, turn)
        )

    def _one(self, on: Any, where: dict[str, Any], turn: str | None) -> Next:
        """The first one of the lane whose turn it is."""
        for after in (None,) if turn is None else (turn, None):
            query = self._first_lane[after is not None, bool(where["full"])]
            is_new = True
            while is_new:
                rows = on.execute(query, {**where, "after": after, "most": 1 + BEYOND}).all()
                is_new = False
                for lane, some in groupby(rows, attrgetter("lane")):
                    left = self._leave(on, where, list(some), 1, True)
                    if left.tasks:
                        return Next(left.tasks, lane)
                    is_new = is_new or left.others > 0
        return Next([], turn)

    def _some(
        self, on: Any, where: dict[str, Any], share: int, room: Room, turn: str | None
    ) -> Next:
        """As many from each lane, from the one on whose turn it is."""
        taken: list[DelayTask] = []
        lanes = self._lanes(on, where, share, turn)
        for number, lane in enumerate(lanes):
            quota = min(-(-(share - len(taken)) // (len(lanes) - number)), room.for_key(lane))
            while rows := on.execute(
                self._first, {**where, "lane": lane, "most": quota + BEYOND}
            ).all():
                left = self._leave(on, where, rows, quota, not taken)
                taken += left.tasks
                if left.is_alone:
                    return Next(taken, lane)
                if left.tasks or not left.others:
                    break
            turn = lane
        return Next(taken, turn)

    def _lanes(self, on: Any, where: dict[str, Any], most: int, turn: str | None) -> list[str]:
        lanes: list[str] = []

        def next(after: str | None) -> str | None:
            query = self._next_lane[after is not None, bool(where["full"])]
            found: str | None = on.execute(query, {**where, "after": after}).scalar()
            return found

        while len(lanes) < most:
            lane = next(turn)
            if lane is None and turn is not None:
                lane = next(None)
            if lane is None or lane in lanes:
                break
            lanes.append(lane)
            turn = lane
        return lanes

    def _leave(
        self, on: Any, where: dict[str, Any], rows: Sequence[Any], quota: int, may_be_alone: bool
    ) -> _Left:
        """Who of these leaves the line: so many of them to run, and those who do not wait any more."""
        over = [row for row in rows if row.is_gone] + self._pushed_away(
            on, [row for row in rows if row.is_later]
        )
        ready = [row for row in rows if not row.is_gone and not row.is_later]
        is_alone = bool(ready) and ready[0].lapses > 0 and may_be_alone  # it may kill its worker
        ready = ready[:1] if is_alone else [row for row in ready if not row.lapses]
        taken: list[DelayTask] = []
        while ready and len(taken) < quota:
            wanted = quota - len(taken)
            some, ready = ready[:wanted], ready[wanted:]
            taken += self._take(on, [(row.task_id, row.version) for row in some])
        ids = {task.id for task in taken}
        if left := over + [row for row in rows if row.task_id in ids]:
            on.execute(self._delete, {**where, "places": [tuple(row[:5]) for row in left]})
        return _Left(taken, len(over), is_alone and bool(taken))

    def _pushed_away(self, on: Any, rows: list[Any]) -> list[Any]:
        """They are not due any more, and wait elsewhere: the sweep finds them."""
        if not rows:
            return []
        free = set(on.execute(self._pick_free, {"ids": [row.task_id for row in rows]}).scalars())
        if free:
            on.execute(self._release, {"ids": sorted(free)})
        return [row for row in rows if row.task_id in free]
