"""The table and its surroundings in numbers, for `delaytasks stats` and the like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    case,
    func,
    literal_column,
    null,
    select,
)

from delaytasks.core.encryption import MARK_LENGTH, NO_NAME, PREFIX, PREFIXES, marks_of, name_in
from delaytasks.core.inputs import is_queue
from delaytasks.core.interfaces import Late, Pending, UntrustedInput
from delaytasks.core.states import LIVE, Status
from delaytasks.core.text import DEFER_MAX_S, DEFERRALS, shown
from delaytasks.storage.abandoned_rows import lease_is_over
from delaytasks.storage.bulk import Bulk
from delaytasks.storage.database import Database
from delaytasks.storage.estimates import estimate
from delaytasks.storage.queue_levels import steps
from delaytasks.storage.schema import BODY, Schema
from delaytasks.storage.types import db_now_plus

#: Leases are renewed long before so many of them are over.
LONG = 100


#: So many rows are counted one by one.
COUNTED = 1_000_000


class OverdueCount(NamedTuple):
    """Tasks that should have begun."""

    tasks: int
    oldest: datetime | None


class Swept(NamedTuple):
    """The last sweep of one house number; no time, if nobody swept it yet."""

    house: int
    at: datetime | None
    armed_until: datetime | None


class Count(NamedTuple):
    rows: int
    is_estimate: bool = False


class Stats:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._s = schema.sweeps
        self._cipher = schema.cipher
        self._bulk = Bulk(database, schema)

    def counts(self) -> dict[Status, Count]:
        """How many rows there are of each status. In a table of millions nobody counts them all: of what is in the
        millions, and of DONE, it is the planner's estimate."""
        return self._db.alone(self._counts)

    def _counts(self, connection: Connection) -> dict[Status, Count]:
        t = self._t
        if estimate(connection, select(t.c.id)) <= COUNTED:
            query = select(t.c.status, func.count()).group_by(t.c.status)
            found = {status: Count(rows) for status, rows in connection.execute(query)}
            return {status: found.get(int(status), Count(0)) for status in Status}
        return {status: self._count(connection, status) for status in Status}

    def _count(self, connection: Connection, status: Status) -> Count:
        t = self._t
        rows = select(t.c.id).where(t.c.status == literal_column(str(int(status))))
        guess = estimate(connection, rows)
        if guess > COUNTED or status is Status.DONE:  # those are in no index of their own
            return Count(guess, is_estimate=True)
        counted = int(
            connection.scalar(select(func.count()).select_from(rows.limit(COUNTED + 1).subquery()))
            or 0
        )
        return Count(counted, is_estimate=counted > COUNTED)

    def overdue(self, late_s: float) -> OverdueCount:
        """Waiting rows that are late by more than `late_s`, also those whose next try is in the future."""
        due, parts = self._due, self._late_parts(late_s)

        def count(connection: Connection) -> OverdueCount:
            found = [
                connection.execute(select(func.count(), func.min(due)).where(part)).one()
                for part in parts
            ]
            return OverdueCount(
                sum(row[0] for row in found), min((row[1] for row in found if row[1]), default=None)
            )

        return self._db.alone(count)

    def _late_parts(self, late_s: float) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        """Return the condition for late rows whose next try is late too, and the one for those whose next try is not.
        Both use the index on `expected_time`: a deferral is not longer than `DEFER_MAX_S`."""
        t, latest = self._t, db_now_plus(-late_s)
        waits = t.c.status == int(Status.NOT_COMPLETE)
        is_near = t.c.expected_time.between(latest, db_now_plus(DEFER_MAX_S))
        return and_(waits, t.c.expected_time <= latest), and_(
            waits, is_near, t.c.due_time <= latest
        )

    @property
    def _due(self) -> ColumnElement[datetime]:
        return func.coalesce(self._t.c.due_time, self._t.c.expected_time)

    def lapsed(self, lease_s: float) -> int:
        """Rows that seem to run, though their lease is over: the next sweep takes them back."""
        query = select(func.count()).where(lease_is_over(self._t, lease_s))
        return self._db.alone(lambda c: int(c.execute(query).scalar_one()))

    def pending(self) -> list[Pending]:
        """The tags that have tasks which are yet to run."""
        t = self._t
        query = select(t.c.tag, t.c.queue, func.count(), func.min(self._due)).where(self._is_live())
        found: dict[str, Pending] = {}
        for tag, queue, tasks, due in self._rows(
            query.group_by(t.c.tag, t.c.queue).order_by(t.c.tag, t.c.queue)
        ):
            seen = found.get(tag, Pending(tag, 0, due))
            found[tag] = Pending(
                tag, seen.tasks + tasks, min(seen.first_due, due), (*seen.queues, queue)
            )
        return list(found.values())

    def late(self, late_s: float, most: int) -> list[Late]:
        """Return what `overdue` counts, by queue, tag and cause of the deferral: the groups with the most tasks."""
        t, groups = self._t, list[Late]()
        is_not_deferred, is_deferred = self._late_parts(late_s)
        codes = [(t.c.error_stack.startswith(begin), code) for begin, code in DEFERRALS.items()]
        cause = case(*codes, else_="deferred")
        for where, why in ((is_not_deferred, null()), (is_deferred, cause)):
            tasks = func.count().label("tasks")
            inner = (
                select(t.c.queue, t.c.tag, why.label("cause"), self._due.label("due"))
                .where(where)
                .subquery()
            )
            c = inner.c
            query = select(c.queue, c.tag, c.cause, tasks, func.min(c.due)).group_by(
                c.queue, c.tag, c.cause
            )
            groups += [Late(*row) for row in self._rows(query.order_by(tasks.desc()).limit(most))]
        return sorted(groups, key=lambda group: -group.tasks)[:most]

    def _rows(self, query: Select[Any]) -> Sequence[Any]:
        return self._db.alone(lambda c: c.execute(query).all())

    def bodies(self, tag: str) -> Iterator[tuple[int, str, datetime]]:
        """(id, body, due) of those of a tag, however many there are."""
        t = self._t
        query = select(t.c.id, t.c.message_body, t.c.expected_time).where(
            self._is_live(), t.c.tag == tag
        )
        for rows in self._db.stream(query.order_by(t.c.expected_time), size=1000):
            if self._cipher is None:
                yield from rows
            else:
                yield from (
                    (id, self._cipher.read(body, BODY, id, tag), due) for id, body, due in rows
                )

    def strange(self, max_delay_s: float, lease_s: float) -> Iterator[UntrustedInput]:
        """Rows that wait, or seem to, and that nobody will take."""
        t = self._t
        waits, runs = t.c.status == int(Status.NOT_COMPLETE), t.c.status == int(Status.RUNNING)
        queues = [
            queue
            for queue in self._db.alone(lambda c: list(steps(c, t.c.queue, waits)))
            if not is_queue(queue)
        ]
        is_far = t.c.expected_time > db_now_plus(max_delay_s)
        problems = {
            "a status that nobody knows": t.c.status.not_in([int(status) for status in Status]),
            f"due later than max_delay_s = {max_delay_s:g} s": and_(waits, is_far),
            "RUNNING, with a lease longer than any": and_(
                runs, t.c.lease_until > db_now_plus(LONG * lease_s)
            ),
            **{
                f"in the queue {shown(queue)}, which is none": and_(waits, t.c.queue == queue)
                for queue in queues
            },
        }
        grouped = select(
            t.c.tag, func.count(), func.min(t.c.expected_time), func.min(t.c.id), func.max(t.c.id)
        )
        for problem, is_so in problems.items():
            query = grouped.where(is_so).group_by(t.c.tag).order_by(t.c.tag)
            for tag, tasks, first_due, first, last in self._db.alone(
                lambda c, query=query: c.execute(query).all()  # type: ignore[misc]
            ):
                yield UntrustedInput(tag, tasks, first_due, (first, last), problem)
        yield from self._without_key()

    def _without_key(self) -> Iterator[UntrustedInput]:
        """Window by window: no statement reads all bodies."""
        t = self._t.c
        marks = [] if self._cipher is None else marks_of(self._cipher.names)
        mark = func.substr(t.message_body, 1, MARK_LENGTH + 1)
        needs = [
            func.substr(t.message_body, 1, len(PREFIX)).in_(PREFIXES),
            *([mark.not_in(marks)] if marks else []),
        ]
        found: dict[tuple[str, str], UntrustedInput] = {}
        for rows in self._bulk.having(LIVE, [t.tag, mark, t.expected_time, t.id], *needs):
            for tag, begin, due, id in rows:
                name = name_in(begin)
                one, seen = (
                    UntrustedInput(tag, 1, due, (id, id), _why(name)),
                    found.get((tag, name)),
                )
                found[tag, name] = one if seen is None else _both(seen, one)
        yield from (found[each] for each in sorted(found))

    def _is_live(self) -> ColumnElement[bool]:
        return self._t.c.status.in_([int(status) for status in LIVE])

    def sweeps(self, houses: int) -> list[Swept]:
        """The last ones, be they of those who have a broker or of those who have none."""
        s = self._s
        mine = s.c.houses.in_([houses, -houses])
        query = select(s.c.house, s.c.swept_at, s.c.armed_until).where(mine).order_by(s.c.swept_at)
        found = self._db.alone(lambda c: {row[0]: Swept(*row) for row in c.execute(query)})
        return [found.get(house, Swept(house, None, None)) for house in range(houses)]

    def server(self) -> str:
        """The database's kind and version."""

        def version(connection: Connection) -> str:
            numbers = connection.dialect.server_version_info or ()
            return f"{connection.dialect.name} {'.'.join(map(str, numbers))}".strip()

        return self._db.alone(version)


def _why(name: str) -> str:
    if name == NO_NAME:
        return f"begins with {' or '.join(PREFIXES)} and names no key: nobody can read it"
    return f"encrypted with key {name}, which delaytasks_encryption_keys does not have here"


def _both(a: UntrustedInput, b: UntrustedInput) -> UntrustedInput:
    ids = *a.ids, *b.ids
    due = min(a.first_due, b.first_due)
    return a._replace(tasks=a.tasks + b.tasks, first_due=due, ids=(min(ids), max(ids)))
