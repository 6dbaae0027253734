"""Policies of tags and queues, and the rows that a pause or a limit holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    Select,
    Table,
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

from delaytasks.db.database import Database
from delaytasks.db.schema import Schema, check_row_count, listed, listing, moved
from delaytasks.db.searching import (
    distinct_values,
    has_status,
    levels_of,
    queues_after,
    waits_between,
)
from delaytasks.db.statements import Insert
from delaytasks.db.types import db_now, db_now_plus, unindexed
from delaytasks.model.clock import to_us
from delaytasks.model.moves import MOVES, Status, following
from delaytasks.model.policies import Kind, Policies, Policy, PolicyRead, Stamp
from delaytasks.model.task import DelayedTask, Entry, FoundRow, Level

# -- Numbers that count the changes which workers look for once a second, in one small table ------


#: The rows of the table: changes of policies, and requests to cancel running tasks.
POLICY_CHANGES, CANCEL_REQUESTS = 1, 2


class ChangeNumbers:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._t = schema.policy_changes
        self._insert = Insert(database, self._t, ("id", "number"))

    def of(self, row: int) -> ScalarSelect[int]:
        """Return the query of a number; it yields NULL if nothing has been counted."""
        return select(self._t.c.number).where(self._t.c.id == row).scalar_subquery()

    def count(self, on: Any, row: int) -> None:
        """Count one change. The row stays locked until the commit."""
        mine = self._t.c.id == row
        counting = update(self._t).where(mine).values(number=self._t.c.number + 1)
        if not on.execute(counting).rowcount:
            self._insert(on, {"id": row, "number": 0})
            check_row_count(on.execute(counting).rowcount, 1, "the number of changes")


# -- The policies ---------------------------------------------------------------------------------

#: The actor of a change that nobody made.
END_OF_PAUSE = "the end of the pause"
#: Seconds for which a cleared policy is kept, so that every process reads that it was cleared.
KEPT_S = 86_400.0


class RowCount(NamedTuple):
    """Rows of one status, and when the first of them was due."""

    rows: int
    first_due: datetime


class PolicyTable:
    """The policies, and the number of the last change.

    Each transaction that changes policies adds one to that number. It keeps the lock on the
    number's row until it commits, so that numbers become visible in their order. A process that has
    read number 7 has seen all changes up to 7, however long one of their transactions took.
    """

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._p = p = schema.policies
        self._t = schema.tasks
        self._insert = Insert(database, p, ("kind", "name", "is_paused", "version"))
        self._numbers = ChangeNumbers(database, schema)
        self._columns = [p.c[field.name] for field in fields(Policy) if field.name in p.c]
        self._listed = tuple_(p.c.kind, p.c.name).in_(listing("policies"))
        self._new_version = {"version": p.c.version + 1, "update_time": db_now()}
        limits = (p.c.concurrency, p.c.concurrency_per_key, p.c.rate, p.c.rate_period_s)
        is_empty = and_(not_(p.c.is_paused), *(limit.is_(None) for limit in limits))
        #: A cleared policy, which is kept for processes that have not read yet that it was cleared.
        self._is_over = and_(
            is_empty, p.c.applied_version.is_not(None), p.c.applied_version == p.c.version
        )

    def read(self, *names: tuple[Kind, str]) -> list[Policy]:
        """Return all policies, or those of these kinds and names."""
        p = self._p
        query = select(*self._columns).where(not_(self._is_over)).order_by(p.c.kind, p.c.name)
        if names:
            query = query.where(or_(*(self._named(*name) for name in names)))
        return [Policy(*row) for row in self._db.rows(query)]

    def unless_known(self, known: Stamp | None, checks: bool) -> PolicyRead:
        """Return all policies, unless those with the stamp `known` are the same.

        Policies that were cleared are included. Changes that were not counted are found with
        `checks`, which reads the whole table.
        """
        p = self._p
        numbers = [self._numbers.of(row) for row in (CANCEL_REQUESTS, POLICY_CHANGES)]
        parts = func.count(), func.sum(p.c.version), func.max(p.c.update_time)
        of_all = [select(part).select_from(p).scalar_subquery() for part in parts]
        head = select(*numbers, *(of_all if checks else ()))

        def work(connection: Any) -> PolicyRead:
            # The number is read first. A change that commits later has a higher number, so the next
            # call reads the policies again.
            requests, number, *others = connection.execute(head).one()
            last, requests = int(number or 0), int(requests or 0)
            if checks:
                stamp = Stamp(last, int(others[0]), int(others[1] or 0), others[2])
            else:
                stamp = (known or Stamp())._replace(number=last)
            if stamp == known:
                return PolicyRead(None, requests)
            rows = connection.execute(select(*self._columns)).all()
            return PolicyRead(Policies((Policy(*row) for row in rows), last), requests)

        return self._db.autocommitted(work)

    def set(
        self, kind: Kind, name: str, changes: Mapping[str, Any], by: str
    ) -> tuple[Policy, bool]:
        """Return the policy after the changes, and whether it changed. An empty new policy is not
        written, and a pause with an end does not replace a longer one."""
        mine = self._named(kind, name)
        query = select(*self._columns).where(mine)

        def is_same(known: Policy) -> bool:
            if known.is_paused and (until := changes.get("paused_until")) is not None:
                return known.paused_until is None or until <= known.paused_until
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
            values = {**changes, "updated_by": by, **self._new_version}
            self._change(connection, [(kind, name)], values)
            return Policy(*connection.execute(query).one()), True

        return self._db.transaction(work)

    def end_pauses(self) -> list[Policy]:
        """End the pauses whose `paused_until` has passed, and return their policies as they are
        then."""
        p = self._p
        is_over = and_(p.c.is_paused, p.c.paused_until <= db_now())
        ending = {"is_paused": False, "paused_until": None, "updated_by": END_OF_PAUSE}

        def work(connection: Any) -> list[Policy]:
            found = self._lock(connection, is_over)
            if not found:
                return []
            self._change(connection, found, {**ending, **self._new_version})
            named = select(*self._columns).where(self._listed)
            return [Policy(*row) for row in connection.execute(named, {"policies": found})]

        return self._db.transaction(work)

    def applied(self, policies: Sequence[Policy]) -> None:
        """Record that all rows are held or released as these versions of the policies require."""
        p = self._p
        of_versions = tuple_(p.c.kind, p.c.name, p.c.version).in_(
            [(policy.kind, policy.name, policy.version) for policy in policies]
        )

        def work(connection: Any) -> None:
            # Policies that were changed meanwhile are left out.
            if found := self._lock(connection, of_versions):
                self._change(connection, found, {"applied_version": p.c.version})

        self._db.transaction(work)

    def _lock(self, on: Any, which: ColumnElement[bool]) -> list[tuple[str, str]]:
        p = self._p
        query = select(p.c.kind, p.c.name).where(which).order_by(p.c.kind, p.c.name)
        return [tuple(row) for row in on.execute(query.with_for_update())]

    def _change(self, on: Any, names: Sequence[tuple[str, str]], values: Mapping[str, Any]) -> None:
        """Change locked policies, and count the change, which makes all processes read them."""
        self._numbers.count(on, POLICY_CHANGES)
        statement = update(self._p).where(self._listed).values(**values)
        changed = on.execute(statement, {"policies": names}).rowcount
        check_row_count(changed, len(names), "policies")

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


def is_entry_of(waitlist: Table, row: Any) -> ColumnElement[bool]:
    """The condition for the entries of a task, or of a row whose columns are `row`."""
    entry = waitlist.c
    return and_(
        entry.queue == row.queue,
        entry.tag == row.tag,
        entry.limit_key == func.coalesce(row.limit_key, ""),
        entry.place == -row.priority,
        entry.due == row.expected_time,
        entry.task_id == row.id,
    )


# -- Rows of paused tags and queues: moved out of the index of live rows, and back into it --------

# The statement that holds rows checks the pause itself. A worker that does not know yet that a
# pause has ended holds no rows.


#: Waitlists of a queue that one call of `waitlists_in` returns: each of them costs a statement.
WAITLISTS_PER_CALL = 100
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
        self._waitlist = waitlist
        #: The tag of each queue after which the next call of `waitlists_in` goes on.
        self._after: dict[str, str] = {}

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

    def waitlists_in(self, queue: str) -> set[tuple[str, str]]:
        """Return `WAITLISTS_PER_CALL` waitlists of a queue, whether or not their tags still have
        limits; the next call returns the next ones."""
        entry, after = self._waitlist.c, self._after.get(queue)
        here = entry.queue == queue
        later = here if after is None else and_(here, entry.tag > after)
        tags = self._db.autocommitted(
            lambda c: list(islice(distinct_values(c, entry.tag, later), WAITLISTS_PER_CALL))
        )
        if len(tags) == WAITLISTS_PER_CALL:
            self._after[queue] = tags[-1]
        elif self._after.pop(queue, None) is not None and not tags:
            return self.waitlists_in(queue)  # the last call returned the last ones
        return {(queue, tag) for tag in tags}

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
        query = select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority)
        # Only tasks are locked: rows of a locked policy would be skipped, too.
        locking = (
            query.where(named)
            .order_by(t.c.id)
            .with_for_update(skip_locked=True, of=t if self._db.can.update_returning else None)
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

    def hold_claimed(self, tasks: Sequence[DelayedTask]) -> set[int]:
        """Hold paused rows that this worker has claimed but not started. Returns the ids of the
        held rows."""
        t, move = self._t, MOVES["hold_back"]
        versions = {task.id: task.version for task in sorted(tasks, key=lambda task: task.id)}
        ids = {"ids": list(versions)}
        mine = and_(
            self._listed,
            tuple_(t.c.id, t.c.version).in_([*versions.items()]),
            unindexed(t.c.status) == int(move.source),
        )
        # The values of a row that was given back: it never ran.
        never_ran = dict.fromkeys(("execution_time", "lease_until", "worker", "ip_address"))
        values = moved(t, move.name, runs=t.c.runs - 1, **never_ran)
        statement = update(t).where(mine, self._is_paused).values(values)
        is_held = unindexed(t.c.status) == int(move.target)
        after = select(t.c.id, t.c.version).where(self._listed, is_held)

        def work(connection: Any) -> set[int]:
            connection.execute(statement, ids)
            # The rows are read instead of counted: an earlier try, whose answer was lost, may have
            # held them.
            held = connection.execute(after, ids)
            return {row[0] for row in held if following(versions[row[0]]) == row[1]}

        return self._db.transaction(work)
