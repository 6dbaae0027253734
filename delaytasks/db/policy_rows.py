"""Policies of tags and queues, and the rows that a pause or a limit holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
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
from delaytasks.db.schema import (
    Schema,
    by_index,
    check_row_count,
    hot_index,
    listed,
    listing,
    move_locked,
    moved,
)
from delaytasks.db.statements import Insert
from delaytasks.db.task_rows import distinct_values, has_status, queue_levels
from delaytasks.db.types import db_now, unindexed
from delaytasks.model.clock import EARLIEST, to_us
from delaytasks.model.moves import MOVES, Status, following
from delaytasks.model.policies import Kind, Policies, Policy, PolicyRead, Stamp
from delaytasks.model.task import DelayedTask, Entry, Level

# -- The policies ---------------------------------------------------------------------------------

#: The actor of a change that nobody made.
END_OF_PAUSE = "the end of the pause"


class RowCount(NamedTuple):
    """Rows of one status, and when the first of them was due."""

    rows: int
    first_due: datetime


class PolicyTable:
    """The policies, of which there are few.

    A policy without a pause and without limits is deleted by the change that makes it so.
    """

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._p = p = schema.policies
        self._t = schema.tasks
        self._insert = Insert(database, p, ("kind", "name", "is_paused", "version"))
        #: The number of requests to cancel running tasks; NULL before the first one.
        self._requests = select(func.sum(schema.cancel_requests.c.number)).scalar_subquery()
        self._columns = [p.c[field.name] for field in fields(Policy) if field.name in p.c]
        self._listed = tuple_(p.c.kind, p.c.name).in_(listing("policies"))
        self._new_version = {"version": p.c.version + 1, "update_time": db_now()}
        limits = (p.c.concurrency, p.c.concurrency_per_key, p.c.rate, p.c.rate_period_s)
        self._is_empty = and_(not_(p.c.is_paused), *(limit.is_(None) for limit in limits))

    def read(self, *names: tuple[Kind, str]) -> list[Policy]:
        """Return all policies, or those of these kinds and names."""
        p = self._p
        query = select(*self._columns).where(not_(self._is_empty)).order_by(p.c.kind, p.c.name)
        if names:
            query = query.where(or_(*(self._named(*name) for name in names)))
        return [Policy(*row) for row in self._db.rows(query)]

    def unless_known(self, known: Stamp | None) -> PolicyRead:
        """Return all policies, unless those with the stamp `known` are the same."""
        p = self._p
        parts = func.count(), func.sum(p.c.version), func.max(p.c.update_time)
        of_all = [select(part).select_from(p).scalar_subquery() for part in parts]
        head = select(self._requests, *of_all)

        def work(connection: Any) -> PolicyRead:
            requests, policies, versions, changed_at = connection.execute(head).one()
            requests = int(requests or 0)
            if Stamp(policies, int(versions or 0), changed_at) == known:
                return PolicyRead(None, requests)
            rows = connection.execute(select(*self._columns)).all()
            return PolicyRead(Policies(Policy(*row) for row in rows), requests)

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
                while row is None:  # a resume may delete the row that others have inserted
                    self._insert(connection, new)
                    row = connection.execute(query.with_for_update()).first()
                known = Policy(*row)
            if is_same(known):
                return known, False
            values = {**changes, "updated_by": by, **self._new_version}
            [policy] = self._change(connection, [(kind, name)], values)
            return policy, True

        return self._db.transaction(work)

    def end_pauses(self) -> list[Policy]:
        """End the pauses whose `paused_until` has passed, and return their policies as they are
        then."""
        p = self._p
        is_over = and_(p.c.is_paused, p.c.paused_until <= db_now())
        ending = {"is_paused": False, "paused_until": None, "updated_by": END_OF_PAUSE}

        ended = select(p.c.kind, p.c.name).where(is_over).order_by(p.c.kind, p.c.name)

        def work(connection: Any) -> list[Policy]:
            found = [tuple(row) for row in connection.execute(ended.with_for_update())]
            values = {**ending, **self._new_version}
            return self._change(connection, found, values) if found else []

        return self._db.transaction(work)

    def _change(
        self, on: Any, names: Sequence[tuple[str, str]], values: Mapping[str, Any]
    ) -> list[Policy]:
        """Change locked policies, and return them as they are then."""
        policies = {"policies": names}
        change = update(self._p).where(self._listed).values(**values)
        check_row_count(on.execute(change, policies).rowcount, len(names), "policies")
        changed = on.execute(select(*self._columns).where(self._listed), policies).all()
        on.execute(delete(self._p).where(self._listed, self._is_empty), policies)
        return [Policy(*row) for row in changed]

    def count(self, status: Status) -> dict[tuple[str, str], RowCount]:
        """Count the rows of this status by tag and queue."""
        t = self._t
        first_due = func.min(func.coalesce(t.c.due_time, t.c.expected_time))
        query = select(t.c.tag, t.c.queue, func.count(), first_due).where(has_status(t, status))
        rows = self._db.rows(query.group_by(t.c.tag, t.c.queue))
        return {(row[0], row[1]): RowCount(row[2], row[3]) for row in rows}

    def _named(self, kind: Kind, name: str) -> Any:
        return and_(self._p.c.kind == kind, self._p.c.name == name)


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


# -- Rows of paused tags and queues: held when they are claimed, released after the pause ---------

# Held rows are not in the index of live rows. The statement that holds rows checks the pause
# itself: a worker that does not know yet that a pause has ended holds no rows.


#: Waitlists of a queue that one call of `waitlists_in` returns: each of them costs a statement.
WAITLISTS_PER_CALL = 100
#: Held rows that one query returns, whatever holds them, and rows that one transaction releases.
HELD_PAGE, RELEASED_ROWS = 5000, 500


class HeldPlace(NamedTuple):
    """A place in the held rows of a level, in the order of due time and id."""

    #: Rows due later follow it, and rows due then with a higher id.
    due: datetime = EARLIEST
    id: int = 0


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
        self._waitlist = waitlist
        # Each policy is found by its name.
        p = schema.policies
        of_tag = exists().where(p.c.is_paused, p.c.kind == "tag", p.c.name == t.c.tag)
        of_queue = exists().where(p.c.is_paused, p.c.kind == "queue", p.c.name == t.c.queue)
        self._is_paused = or_(of_tag.correlate(t), of_queue.correlate(t))
        #: The tag of each queue after which the next call of `waitlists_in` goes on.
        self._after: dict[str, str] = {}

    def search(self) -> HeldSearch:
        """Return a search for the held rows that may run again."""
        return HeldSearch(self)

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

    def levels(self) -> list[Level]:
        """Return the levels that have held rows, the highest priority first."""
        levels = self._db.autocommitted(lambda c: queue_levels(c, self._t, Status.HELD))
        return sorted(levels, key=lambda at: (-at.priority, at.queue))

    def page(
        self, level: Level, place: HeldPlace
    ) -> tuple[list[tuple[int, str]], HeldPlace | None]:
        """Return the next held rows of a level as their ids and tags, and the place after them,
        which is None after the last page.

        Rows are read in the order of the index, whatever holds them.
        """
        t, due = self._t, self._t.c.expected_time
        query = by_index(select(t.c.id, t.c.tag, due), t, hot_index(t))
        query = query.where(
            has_status(t, Status.HELD), t.c.queue == level.queue, t.c.priority == level.priority
        )
        # The comparison of the pair alone would be no range of the index on MySQL.
        query = query.where(due >= place.due, tuple_(due, t.c.id) > (place.due, place.id))
        rows = self._db.rows(query.order_by(due, t.c.id).limit(HELD_PAGE))
        is_last = len(rows) < HELD_PAGE
        end = None if is_last else HeldPlace(rows[-1].expected_time, rows[-1].id)
        return [(row.id, row.tag) for row in rows], end

    def release(self, ids: Sequence[int]) -> list[Entry]:
        """Release those of these held rows that neither a pause nor a waitlist holds and that no
        other transaction has locked. Return them as they wait now."""
        t, move = self._t, MOVES["release"]
        query = select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority)
        query = query.where(self._listed, unindexed(t.c.status) == int(move.source))
        query = query.where(not_(self._is_paused), self._is_not_in_waitlist)
        locking = query.order_by(t.c.id).with_for_update(skip_locked=True)
        releasing = update(t).values(moved(t, move.name))

        def work(connection: Any) -> list[Entry]:
            rows = connection.execute(locking, {"ids": ids}).all()
            if rows:
                move_locked(connection, releasing, [row.id for row in rows], "rows to release")
            return [Entry(row[0], following(row[1]), to_us(row[2]), row[3], row[4]) for row in rows]

        return self._db.transaction(work)

    def waitlists_in(self, queue: str) -> set[tuple[str, str]]:
        """Return `WAITLISTS_PER_CALL` waitlists of a queue, whether or not their tags still have
        limits; the next call returns the next ones."""
        entry, after = self._waitlist.c, self._after.get(queue)

        def next_tags(on: Any) -> list[str]:
            names = distinct_values(on, entry.tag, entry.queue == queue, after)
            return list(islice(names, WAITLISTS_PER_CALL))

        tags = self._db.autocommitted(next_tags)
        if len(tags) == WAITLISTS_PER_CALL:
            self._after[queue] = tags[-1]
        elif self._after.pop(queue, None) is not None and not tags:
            return self.waitlists_in(queue)  # the last call returned the last ones
        return {(queue, tag) for tag in tags}


class HeldSearch:
    """Releases the held rows that no pause and no waitlist holds, by priority and due time.

    Most held rows may stay held. So each step reads a bounded number of rows, whatever holds them,
    and the place is kept. A step that fails is done again.
    """

    def __init__(self, rows: PausedRows) -> None:
        self._rows = rows
        #: What has yet to be read: the rows of a level after a place.
        self._parts = deque[tuple[Level, HeldPlace]]()
        #: Rows that were read, and have yet to be released.
        self._ids: list[int] = []

    @property
    def is_over(self) -> bool:
        return not self._parts and not self._ids

    def begin(self) -> None:
        """Begin at the first row."""
        self._parts = deque((level, HeldPlace()) for level in self._rows.levels())
        self._ids = []

    def step(self, policies: Policies) -> list[Entry]:
        """Read some rows, or release some of those that were read, and return the released ones.

        Rows that `policies` pause are skipped. If these are no longer the policies of now, another
        search follows.
        """
        if not self._ids:
            self._read(policies)
            return []
        ids = self._ids[:RELEASED_ROWS]
        released = self._rows.release(ids)
        del self._ids[: len(ids)]
        return released

    def _read(self, policies: Policies) -> None:
        level, place = self._parts[0]
        after: HeldPlace | None = None
        if level.queue not in policies.paused_queues:
            found, after = self._rows.page(level, place)
            self._ids = [id for id, tag in found if tag not in policies.paused_tags]
        if after is None:
            self._parts.popleft()
        else:
            self._parts[0] = level, after
