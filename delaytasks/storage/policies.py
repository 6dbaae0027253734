"""The table of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    and_,
    delete,
    exists,
    func,
    not_,
    or_,
    select,
    tuple_,
    update,
)

from delaytasks.core.policies import Changes, Kind, Policy, Stamp
from delaytasks.core.states import Status
from delaytasks.storage.change_numbers import CANCEL_REQUESTS, POLICY_CHANGES, ChangeNumbers
from delaytasks.storage.database import Database
from delaytasks.storage.inserts import Insert
from delaytasks.storage.queue_levels import has_status
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.row_lists import listing
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus

#: Seconds for which a cleared policy is kept, so that every process reads that it was cleared.
KEPT_S = 86_400.0


class RowCount(NamedTuple):
    """Rows of one status, and when the first of them was due."""

    rows: int
    first_due: datetime


class PolicyTable:
    """The policies of one database, and the number of the last change.

    Each transaction that changes policies adds one to that number, and writes the new number into
    the policies. It keeps the lock on the number's row until it commits, so that numbers become
    visible in their order. A process that has read number 7 has seen all changes up to 7, however
    long one of their transactions took.
    """

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._p = p = schema.policies
        self._t = schema.tasks
        self._insert = Insert(database, p, ("kind", "name", "is_paused", "version"))
        self._numbers = ChangeNumbers(database, schema)
        self._columns = [p.c[field.name] for field in fields(Policy) if field.name in p.c]
        limits = (p.c.concurrency, p.c.key_concurrency, p.c.rate, p.c.rate_period_s)
        is_empty = and_(not_(p.c.is_paused), *(limit.is_(None) for limit in limits))
        #: A cleared policy, which is kept for processes that have not read yet that it was cleared.
        self._is_over = and_(
            is_empty, p.c.applied_version.is_not(None), p.c.applied_version == p.c.version
        )

    def read(self, kind: Kind | None = None, name: str | None = None) -> list[Policy]:
        """Return all policies, or the one of this name."""
        return self._read() if kind is None or name is None else self._read(self._named(kind, name))

    def _read(self, *conditions: ColumnElement[bool]) -> list[Policy]:
        p = self._p
        query = select(*self._columns).where(not_(self._is_over), *conditions)
        return [Policy(*row) for row in self._db.rows(query.order_by(p.c.kind, p.c.name))]

    def check(self) -> None:
        """Read what `changes` reads, of one policy at most."""
        for query in (select(*self._columns).limit(1), select(self._numbers.of(POLICY_CHANGES))):
            self._db.rows(query)

    def changes(self, since: int | None, checks: bool) -> Changes:
        """Return the policies that changed after the change of this number, or all of them if it is
        None.

        Policies that were cleared are included. With `checks` the stamp of the whole table is
        returned.
        """
        p = self._p
        numbers = [self._numbers.of(row) for row in (POLICY_CHANGES, CANCEL_REQUESTS)]
        parts = func.count(), func.sum(p.c.version), func.max(p.c.update_time)
        of_all = [select(part).select_from(p).scalar_subquery() for part in parts]
        head = select(*numbers, *(of_all if checks else ()))

        def work(connection: Any) -> Changes:
            # The number is read first. A change that commits later has a higher number, so the next
            # call reads it.
            found = connection.execute(head).one()
            last, requests = int(found[0] or 0), int(found[1] or 0)
            # Or another server took over, which lacks some changes.
            is_whole = since is None or last < since
            stamp = Stamp(last, int(found[2]), int(found[3] or 0), found[4]) if checks else None
            if last == since:
                return Changes(last, [], False, stamp, requests)
            query = select(*self._columns)
            query = query if is_whole else query.where(p.c.change_number > since)
            rows = connection.execute(query).all()
            return Changes(last, [Policy(*row) for row in rows], is_whole, stamp, requests)

        return self._db.autocommitted(work)

    def of(self, tag: str, queue: str) -> list[Policy]:
        """Return the policies of a tag and of a queue."""
        return self._read(or_(self._named("tag", tag), self._named("queue", queue)))

    def set(
        self, kind: Kind, name: str, changes: Mapping[str, Any], by: str
    ) -> tuple[Policy, bool]:
        """Return the policy after the changes, and whether it changed. An empty new policy is not
        written."""
        p, mine = self._p, self._named(kind, name)
        query = select(*self._columns).where(mine)

        def is_same(known: Policy) -> bool:
            return all(getattr(known, field) == value for field, value in changes.items())

        def work(connection: Any) -> tuple[Policy, bool]:
            row = connection.execute(query.with_for_update()).first()
            known = Policy(kind, name) if row is None else Policy(*row)
            if row is None and not is_same(known):
                new = {"kind": kind, "name": name, "is_paused": False, "version": 0}
                self._insert(connection, new)
                known = Policy(*connection.execute(query.with_for_update()).one())
            if is_same(known):
                return known, False
            values = {
                **changes,
                "version": p.c.version + 1,
                "update_time": db_now(),
                "updated_by": by,
                "change_number": self._numbers.next(connection, POLICY_CHANGES),
            }
            changed = connection.execute(update(p).where(mine).values(**values)).rowcount
            check_row_count(changed, 1, f"the policy of the {kind} {name!r}")
            return Policy(*connection.execute(query).one()), True

        return self._db.transaction(work)

    def applied(self, policies: Sequence[Policy]) -> None:
        """Record that all rows are held or released as these versions of the policies require."""
        p = self._p
        ordered = sorted((policy.kind, policy.name, policy.version) for policy in policies)
        named = tuple_(p.c.kind, p.c.name, p.c.version).in_(listing("policies"))
        locking = select(p.c.kind, p.c.name, p.c.version).where(named)
        locking = locking.order_by(p.c.kind, p.c.name).with_for_update()
        applying = update(p).where(named)

        def work(connection: Any) -> None:
            # Policies that were changed meanwhile are left out.
            found = [tuple(row) for row in connection.execute(locking, {"policies": ordered})]
            if found:
                values = {
                    "applied_version": p.c.version,
                    "change_number": self._numbers.next(connection, POLICY_CHANGES),
                }
                statement = applying.values(values)
                changed = connection.execute(statement, {"policies": found}).rowcount
                check_row_count(changed, len(found), "policies")

        self._db.transaction(work)

    def forget(self, older_than_s: float = KEPT_S) -> int:
        """Delete policies that were cleared more than `older_than_s` seconds ago."""
        p = self._p
        old = and_(self._is_over, p.c.update_time < db_now_plus(-older_than_s))
        return self._db.autocommitted(lambda c: int(c.execute(delete(p).where(old)).rowcount))

    def count(self, status: Status) -> dict[tuple[str, str], RowCount]:
        """Count the rows of this status by tag and queue."""
        t = self._t
        first_due = func.min(func.coalesce(t.c.due_time, t.c.expected_time))
        query = select(t.c.tag, t.c.queue, func.count(), first_due).where(has_status(t, status))
        rows = self._db.rows(query.group_by(t.c.tag, t.c.queue))
        return {(row[0], row[1]): RowCount(row[2], row[3]) for row in rows}

    def _named(self, kind: Kind, name: str) -> Any:
        return and_(self._p.c.kind == kind, self._p.c.name == name)


def is_paused(schema: Schema) -> ColumnElement[bool]:
    """The condition that a row's tag or queue is paused. Each policy is found by its name."""
    t, p = schema.tasks, schema.policies
    of_tag = exists().where(p.c.is_paused, p.c.kind == "tag", p.c.name == t.c.tag)
    of_queue = exists().where(p.c.is_paused, p.c.kind == "queue", p.c.name == t.c.queue)
    return or_(of_tag.correlate(t), of_queue.correlate(t))
