"""Counts of tasks, sweeps and untrusted rows for `delaytasks stats` and similar commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, func, select, text

from delaytasks.core.body import (
    MARK_LENGTH,
    NO_NAME,
    PREFIX,
    marks_of,
    name_in,
)
from delaytasks.core.interfaces import Pending, UntrustedInput
from delaytasks.core.states import LIVE, Status
from delaytasks.storage.abandoned_rows import lease_is_over
from delaytasks.storage.bulk import Bulk
from delaytasks.storage.capabilities import for_database
from delaytasks.storage.database import Database
from delaytasks.storage.estimates import estimate
from delaytasks.storage.queue_levels import has_status
from delaytasks.storage.schema import BODY, Schema
from delaytasks.storage.types import db_now_plus

#: A lease that ends after this number of lease periods cannot be ours.
LONG_LEASES = 100
#: Up to this number, rows are counted exactly.
MAX_COUNTED = 1_000_000


#: Queries whose first value says whether the server is a standby, whether it replicates
#: synchronously, and whether a synchronous standby is connected. A role without pg_monitor sees
#: NULL for the state of each standby.
_POSTGRESQL_ROLE = (
    "SELECT pg_is_in_recovery()",
    "SELECT current_setting('synchronous_standby_names') <> ''",
    "SELECT 1 FROM pg_stat_replication WHERE COALESCE(sync_state, 'sync') IN ('sync', 'quorum')",
)
_MYSQL_ROLE = (
    "SELECT @@global.read_only",
    "SHOW GLOBAL VARIABLES WHERE variable_name IN "
    "('rpl_semi_sync_master_enabled', 'rpl_semi_sync_source_enabled') AND value = 'ON'",
    "SHOW GLOBAL STATUS WHERE variable_name IN "
    "('Rpl_semi_sync_master_clients', 'Rpl_semi_sync_source_clients') AND value <> '0'",
)


class Swept(NamedTuple):
    """The last sweep of one sweep partition; no time if it was never swept."""

    sweep_partition: int
    at: datetime | None
    armed_until: datetime | None

    def age_s(self, now: datetime) -> float | None:
        return None if self.at is None else max((now - self.at).total_seconds(), 0.0)

    def is_late(self, now: datetime, limit_s: float) -> bool:
        """Return whether no sweep has run for `limit_s` seconds."""
        age_s = self.age_s(now)
        return age_s is None or age_s > limit_s


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

    def counts(self, most: int = MAX_COUNTED) -> dict[Status, Count]:
        """Return the number of rows of each status.

        In a table of more than `most` rows, larger numbers and that of DONE are the planner's
        estimates.
        """
        return self._db.autocommitted(lambda connection: self._counts(connection, most))

    def _counts(self, connection: Connection, most: int) -> dict[Status, Count]:
        t = self._t
        if estimate(connection, select(t.c.id)) <= most:
            query = select(t.c.status, func.count()).group_by(t.c.status)
            found = {status: Count(rows) for status, rows in connection.execute(query)}
            return {status: found.get(int(status), Count(0)) for status in Status}
        return {status: self._count(connection, status, most) for status in Status}

    def _count(self, connection: Connection, status: Status, most: int) -> Count:
        t = self._t
        rows = select(t.c.id).where(has_status(t, status))
        if status is Status.DONE:  # it has no index
            return Count(estimate(connection, rows), is_estimate=True)
        first = rows.limit(most + 1).subquery()
        counted = connection.scalar(select(func.count()).select_from(first)) or 0
        if counted <= most:
            return Count(counted)
        return Count(max(counted, estimate(connection, rows)), is_estimate=True)

    def expired_leases(self) -> int:
        """Count RUNNING rows whose lease is over. The next sweep recovers them."""
        query = select(func.count()).where(lease_is_over(self._t))
        return self._db.autocommitted(lambda c: int(c.execute(query).scalar_one()))

    def pending(self) -> list[Pending]:
        """Return the tags that have tasks yet to run."""
        t = self._t
        first_due = func.min(func.coalesce(t.c.due_time, t.c.expected_time))
        query = select(t.c.tag, t.c.queue, func.count(), first_due).where(self._is_live())
        found: dict[str, Pending] = {}
        for tag, queue, tasks, due in self._db.rows(
            query.group_by(t.c.tag, t.c.queue).order_by(t.c.tag, t.c.queue)
        ):
            seen = found.get(tag, Pending(tag, 0, due))
            found[tag] = Pending(
                tag, seen.tasks + tasks, min(seen.first_due, due), (*seen.queues, queue)
            )
        return list(found.values())

    def bodies(self, tag: str) -> Iterator[tuple[int, str, datetime, str | None]]:
        """Yield (id, body, due, headers) of a tag's live tasks."""
        t = self._t
        query = select(t.c.id, t.c.message_body, t.c.expected_time, t.c.headers).where(
            self._is_live(), t.c.tag == tag
        )
        for rows in self._db.stream(query.order_by(t.c.expected_time), size=1000):
            if self._cipher is None:
                yield from rows
            else:
                yield from (
                    (id, self._cipher.read(body, BODY, id, tag), *others)
                    for id, body, *others in rows
                )

    def strange(self, max_delay_s: float, lease_s: float) -> Iterator[UntrustedInput]:
        """Yield live rows that no worker will take."""
        t = self._t
        waits, runs = t.c.status == int(Status.NOT_COMPLETE), t.c.status == int(Status.RUNNING)
        is_far = t.c.expected_time > db_now_plus(max_delay_s)
        problems = {
            f"due later than max_delay_s = {max_delay_s:g} s": and_(waits, is_far),
            "RUNNING, with a longer lease than any worker sets": and_(
                runs, t.c.lease_until > db_now_plus(LONG_LEASES * lease_s)
            ),
        }
        grouped = select(
            t.c.tag, func.count(), func.min(t.c.expected_time), func.min(t.c.id), func.max(t.c.id)
        )
        for problem, is_so in problems.items():
            query = grouped.where(is_so).group_by(t.c.tag).order_by(t.c.tag)
            for tag, tasks, first_due, first, last in self._db.rows(query):
                yield UntrustedInput(tag, tasks, first_due, (first, last), problem)
        yield from self._without_key()

    def _without_key(self) -> Iterator[UntrustedInput]:
        """Yield live rows that no key here can decrypt, window by window: no statement reads all
        bodies."""
        t = self._t.c
        marks = [] if self._cipher is None else marks_of(self._cipher.names)
        mark = func.substr(t.message_body, 1, MARK_LENGTH + 1)
        needs = [
            func.substr(t.message_body, 1, len(PREFIX)) == PREFIX,
            *([mark.not_in(marks)] if marks else []),
        ]
        found: dict[tuple[str, str], UntrustedInput] = {}
        for rows in self._bulk.having(LIVE, [t.tag, mark, t.expected_time, t.id], *needs):
            for tag, begin, due, id in rows:
                name = name_in(begin)
                one = UntrustedInput(tag, 1, due, (id, id), _why(name))
                seen = found.get((tag, name))
                found[tag, name] = one if seen is None else _both(seen, one)
        yield from (found[each] for each in sorted(found))

    def _is_live(self) -> ColumnElement[bool]:
        return self._t.c.status.in_([int(status) for status in LIVE])

    def sweeps(self, sweep_partitions: int) -> list[Swept]:
        """Return the last sweep of each sweep partition, with or without a broker."""
        s = self._s
        mine = s.c.sweep_partitions.in_([sweep_partitions, -sweep_partitions])
        columns = s.c.sweep_partition, s.c.swept_at, s.c.armed_until
        rows = self._db.rows(select(*columns).where(mine).order_by(s.c.swept_at))
        found = {row[0]: Swept(*row) for row in rows}
        return [found.get(n, Swept(n, None, None)) for n in range(sweep_partitions)]

    def standby_problem(self) -> str | None:
        """Return what is wrong with the server's role in a replication, for `check`."""
        queries: Sequence[str] = for_database(
            self._db.backend, postgresql=_POSTGRESQL_ROLE, mysql=_MYSQL_ROLE, sqlite=()
        )

        def read(connection: Connection) -> list[bool]:
            return [bool(connection.execute(text(query)).scalar()) for query in queries]

        match self._db.autocommitted(read):
            case [True, *_]:
                return "it is a standby, which accepts no tasks"
            case [_, True, False]:
                return "it replicates synchronously, and no synchronous standby is connected"
        return None

    def server(self) -> str:
        """Return the database's kind and version."""

        def version(connection: Connection) -> str:
            numbers = connection.dialect.server_version_info or ()
            return f"{connection.dialect.name} {'.'.join(map(str, numbers))}".strip()

        return self._db.autocommitted(version)


def _why(name: str) -> str:
    if name == NO_NAME:
        return f"begins with {PREFIX} and names no key: no process can read it"
    return f"encrypted with key {name}, which delaytasks_encryption_keys does not have here"


def _both(a: UntrustedInput, b: UntrustedInput) -> UntrustedInput:
    ids = *a.ids, *b.ids
    due = min(a.first_due, b.first_due)
    return a._replace(tasks=a.tasks + b.tasks, first_due=due, ids=(min(ids), max(ids)))
