"""The table as the sweep sees it: near, overdue and lapsed rows, and old ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from sqlalchemy import Select, and_, delete, exc, exists, insert, not_, select, update

from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Entry, Lapsed, Level, QueuePlace
from delaytasks.core.policies import NO_POLICIES, Policies
from delaytasks.core.states import FINISHED, Status
from delaytasks.storage.abandoned_rows import AbandonedRows, lease_is_over
from delaytasks.storage.attempts import Attempts
from delaytasks.storage.audit import Audit
from delaytasks.storage.database import Database
from delaytasks.storage.partition_bounds import end_of
from delaytasks.storage.policies import is_paused
from delaytasks.storage.queue_levels import first_levels_of, levels, queues_after, steps
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys
from delaytasks.storage.types import db_now, db_now_plus, is_past

#: Neighbouring ids go to different houses; ids of one producer differ mostly in their low bits.
_HOUSE_PRIME = 1_000_003
#: Priorities of one queue that a sweep looks at; a drain token holds no more.
MOST_PRIORITIES = 100


class SweepQueries:
    def __init__(self, database: Database, schema: Schema, lease_s: float, timer: str) -> None:
        self._db = database
        self._lease_s = lease_s
        self._timer = timer
        #: Who works without a broker sends nothing for those who have one: its sweeps count for its kind alone.
        self._sign = -1 if timer == "direct" else 1
        self._lapses = AbandonedRows(database, schema)
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self._audit = Audit(database, schema)
        self._t = schema.tasks
        self._s = schema.sweeps
        self._l = schema.lines
        self._is_paused = is_paused(schema)

    def begin_sweep(self, house: int, houses: int, at_least_s: float) -> datetime | None:
        """Until when near rows were armed, if this sweep is ours to do; None if somebody just did it.

        Any number of beats and workers may ask: the row's lock lets one through.
        """
        s = self._s

        def work() -> datetime | None:
            with self._db.begin() as connection:
                mine = and_(s.c.house == house, s.c.houses == self._sign * houses)
                found = (
                    select(s.c.swept_at, s.c.armed_until, s.c.timer).where(mine).with_for_update()
                )
                row = connection.execute(found).first()
                now: datetime = connection.execute(select(db_now())).scalar_one()
                if row is None:
                    new = {
                        "house": house,
                        "houses": self._sign * houses,
                        "swept_at": now,
                        "armed_until": now,
                        "timer": self._timer,
                    }
                    connection.execute(insert(s).values(new))
                    return now
                is_set_back = row.swept_at > now  # or a server took over whose clock is behind
                if not is_set_back and row.swept_at > now - timedelta(seconds=at_least_s):
                    return None
                # What another timer holds does not reach our workers: near rows are armed anew.
                armed_until = now if is_set_back or row.timer != self._timer else row.armed_until
                values = {"swept_at": now, "armed_until": armed_until, "timer": self._timer}
                connection.execute(update(s).where(mine).values(values))
                return armed_until

        try:
            return self._db.run(work)
        except Exception as error:
            if isinstance(error.__cause__, exc.IntegrityError):
                return None  # two first sweeps at once
            raise

    def mark_armed(self, house: int, houses: int, since: datetime, until: datetime) -> None:
        """Near rows are armed until then, unless it was forgotten meanwhile that they were until `since`."""
        s = self._s
        mine = and_(s.c.house == house, s.c.houses == self._sign * houses, s.c.armed_until == since)
        statement = update(s).where(mine).values(armed_until=until)
        self._db.alone(lambda c: c.execute(statement))

    def forget_armed(self) -> None:
        """What was armed may be lost with a worker or a broker: the next sweeps arm it again."""
        s = self._s
        self._db.alone(
            lambda c: c.execute(
                update(s).where(s.c.armed_until > db_now()).values(armed_until=db_now())
            )
        )

    def stale_houses(self, houses: int, age_s: float) -> list[int]:
        """The house numbers that nobody swept for so long."""
        s = self._s
        # What was swept in the future was swept by a clock that is no more.
        lately = and_(s.c.swept_at > db_now_plus(-age_s), s.c.swept_at <= db_now())
        fresh = select(s.c.house).where(s.c.houses == self._sign * houses, lately)
        swept = set(self._db.alone(lambda c: c.execute(fresh).scalars().all()))
        return [house for house in range(houses) if house not in swept]

    def near(
        self,
        since: datetime,
        until: datetime,
        house: int,
        houses: int,
        policies: Policies = NO_POLICIES,
    ) -> Iterator[list[Entry]]:
        """Waiting rows due in (since, until] that are not paused, some hundreds at a time, by due time."""
        query = self._near(since, until, policies)
        if houses > 1:
            query = query.where((self._t.c.id % _HOUSE_PRIME) % houses == house)
        for rows in self._db.stream(query, size=1000):
            yield _entries(rows)

    def look(
        self, since: datetime, until: datetime, limit: int, policies: Policies = NO_POLICIES
    ) -> list[Entry]:
        """The first ones of these, in a single statement: for who looks often."""
        query = self._near(since, until, policies).limit(limit)
        return _entries(self._db.alone(lambda c: c.execute(query).all()))

    def _near(self, since: datetime, until: datetime, policies: Policies) -> Select[Any]:
        t = self._t
        query = (
            select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority)
            # `+ 0` keeps planners from reading all rows that wait for the few that are near.
            .where(
                t.c.status + 0 == int(Status.NOT_COMPLETE),
                t.c.expected_time > since,
                t.c.expected_time <= until,
            )
            .order_by(t.c.expected_time)
        )
        if policies.has_pauses:
            query = query.where(not_(self._is_paused))
        return query

    def levels(self, late_s: float) -> list[Level]:
        """The queues and priorities that have rows late by more than `late_s`, the highest priority first; and queues
        in which tasks of limited tags wait in line.

        Its cost is the number of levels, not of rows. If that number has to be bounded, call `levels_of`.
        """
        line_queue = self._l.c.queue

        def work(connection: Any) -> list[Level]:
            waiting = levels(connection, self._t, Status.NOT_COMPLETE)
            return self._late(connection, waiting, steps(connection, line_queue), late_s)

        return self._db.alone(work)

    def levels_of(self, queues: Iterable[str], late_s: float) -> list[Level]:
        """Return what `levels` returns for these queues: at most `MOST_PRIORITIES` levels of each queue."""
        t, line_queue = self._t, self._l.c.queue

        def work(connection: Any) -> list[Level]:
            found: list[Level] = []
            for queue in queues:
                waiting = first_levels_of(
                    connection, t, Status.NOT_COMPLETE, queue, MOST_PRIORITIES
                )
                in_line = steps(connection, line_queue, line_queue == queue)
                found += self._late(connection, waiting, in_line, late_s)
            return found

        return self._db.alone(work)

    def next_queues(self, after: QueuePlace, most: int) -> tuple[set[str], QueuePlace]:
        """Return some of the queues in which tasks wait, and where the next call goes on.

        A call returns at most `most` queues of the tasks and `most` queues of the waitlists. A caller that passes the
        returned place to its next call meets every queue, one part after another, and then begins again.
        """
        line_queue = self._l.c.queue

        def work(connection: Any) -> tuple[set[str], QueuePlace]:
            tasks = queues_after(connection, self._t, Status.NOT_COMPLETE, after.tasks, most)
            later = None if after.lines is None else line_queue > after.lines
            lines = list(islice(steps(connection, line_queue, later), most))
            # A part that is not full was the last one.
            place = QueuePlace(
                *(part[-1] if len(part) == most else None for part in (tasks, lines))
            )
            return {*tasks, *lines}, place

        return self._db.alone(work)

    def _late(
        self, on: Any, waiting: Iterable[Level], in_line: Iterable[str], late_s: float
    ) -> list[Level]:
        t = self._t

        def is_late(level: Level) -> bool:
            here = (
                t.c.status == int(Status.NOT_COMPLETE),
                t.c.queue == level.queue,
                t.c.priority == level.priority,
            )
            late = and_(*here, is_past(t.c.expected_time, db_now_plus(-late_s)))
            return bool(on.execute(select(exists().where(late))).scalar())

        found = [level for level in waiting if is_late(level)]
        known = {level.queue for level in found}
        found += [Level(queue, 0) for queue in in_line if queue not in known]
        return sorted(found, key=lambda level: (-level.priority, level.queue))

    def lapse(self, max_lost_leases: int, limit: int) -> Lapsed:
        """RUNNING rows whose lease is over: their worker is dead or stuck."""
        return self._lapses.lapse(lease_is_over(self._t, self._lease_s), max_lost_leases, limit)

    def purge(self, older_than_s: float, limit: int) -> int:
        """One small step: finished rows that were last touched long ago."""
        t = self._t
        is_finished = (t.c.status + 0).in_(
            [int(s) for s in FINISHED]
        )  # `+ 0`: to be found by time, not by status
        old = and_(is_finished, t.c.update_time < db_now_plus(-older_than_s))
        # The index on expected_time finds the old ones: what ran was due before. What was cancelled early counts from
        # its due time.
        query = (
            select(t.c.id, t.c.tag, t.c.task_key)
            .where(old)
            .order_by(t.c.expected_time)
            .limit(limit)
        )

        def work() -> int:
            with self._db.begin() as connection:
                # Asked for first: planners that know the instant know how many rows are older, mostly none.
                since = connection.execute(select(db_now_plus(-older_than_s))).scalar_one()
                rows = connection.execute(query.where(t.c.expected_time < since)).all()
                if not rows:
                    return 0
                ids = t.c.id.in_(sorted(row[0] for row in rows))
                # Keys whose task another program finished still name it.
                locked = self._keys.lock_all(
                    connection, [row for row in rows if row[2] is not None]
                )
                purged = int(connection.execute(delete(t).where(ids, old)).rowcount)
                # Some may have been retried meanwhile.
                left = set(connection.execute(select(t.c.id).where(ids)).scalars())
                self._attempts.forget(connection, [row[0] for row in rows if row[0] not in left])
                self._keys.release_all(connection, [row for row in locked if row[0] not in left])
                return purged

        return self._db.run(work)

    def purge_audit(self, older_than_s: float) -> None:
        self._audit.purge(older_than_s)

    def partitions_end(self) -> datetime | None:
        """When the last of the table's partitions will be full, if it has any."""
        return self._db.alone(lambda c: end_of(c, self._t)) if self._db.can.partitions else None


def _entries(rows: Iterable[Any]) -> list[Entry]:
    return [Entry(row[0], row[1], to_us(row[2]), row[3], row[4]) for row in rows]
