"""The SQL of limits: policies of limited tags, the entries of waitlists, and overdue backlogs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    String,
    and_,
    any_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    literal_column,
    select,
    tuple_,
    update,
)

from delaytasks.db.database import Database
from delaytasks.db.row_lists import Prepared, check_row_count, listed, listing
from delaytasks.db.rows import next_version, task_of
from delaytasks.db.schema import Schema
from delaytasks.db.types import db_now, db_now_plus, is_narrow, is_past, unindexed
from delaytasks.model.moves import MOVES, Status
from delaytasks.model.task import DelayedTask

#: Rows of other keys are looked for among this number of the oldest rows.
OTHER_KEYS_AMONG = 100_000
_HELD = int(MOVES["admit"].source)


class PolicyQueries:
    """The policy of a limited tag, and the tasks of the tag that run."""

    def __init__(self, schema: Schema) -> None:
        t, p = schema.tasks, schema.policies
        of_tag = and_(p.c.kind == "tag", p.c.name == bindparam("tag"))
        self._lock = select(p).where(of_tag).with_for_update()
        self._change = update(p).where(of_tag)
        runs = and_(
            t.c.status == literal_column(f"{Status.RUNNING:d}"), t.c.tag == bindparam("tag")
        )
        self._running: Any = select(literal_column("''"), func.count()).where(runs)
        key = func.coalesce(t.c.limit_key, "")
        self._running_by_key = select(key, func.count()).where(runs).group_by(key)
        self._now = select(db_now())

    def lock(self, on: Connection, tag: str) -> Any:
        """Return the tag's policy, locked: meanwhile no other worker measures its capacity."""
        return on.execute(self._lock, {"tag": tag}).first()

    def running(self, on: Connection, tag: str, by_key: bool) -> dict[str, int]:
        """Count the running tasks of each limit key, or all of them under the key ''."""
        query = self._running_by_key if by_key else self._running
        return dict(on.execute(query, {"tag": tag}).all())

    def now(self, on: Connection) -> datetime:
        """Return the time of the database; a statement that waited for a lock began earlier."""
        now: datetime = on.execute(self._now).scalar_one()
        return now

    def change(self, on: Connection, tag: str, values: Mapping[str, Any]) -> None:
        """Change columns of the policy; `next_start` is given in seconds from now."""
        if "next_start" in values:
            values = {**values, "next_start": db_now_plus(values["next_start"])}
        changed = on.execute(self._change.values(values), {"tag": tag})
        check_row_count(changed.rowcount, 1, f"the policy of the tag {tag!r}")


class WaitlistQueries:
    """The entries of waitlists, and their rows."""

    def __init__(self, database: Database, schema: Schema) -> None:
        t, entry = schema.tasks, schema.waitlists
        key = entry.c.limit_key
        position = (key, entry.c.place, entry.c.due, entry.c.task_id, entry.c.version)
        named = listed(database, t.c.id, "ids")
        task_key = func.coalesce(t.c.limit_key, "")
        values = select(
            t.c.queue, t.c.tag, task_key, -t.c.priority, t.c.expected_time, t.c.id, t.c.version
        ).where(named)
        self._insert = insert(entry).from_select([entry.c.queue, entry.c.tag, *position], values)
        changes = {"version": next_version(t.c.version), "update_time": db_now()}
        moves = {
            name: update(t).values({**changes, "status": int(MOVES[name].target)}).where(named)
            for name in ("hold", "release")
        }
        self._hold, self._release = moves["hold"], moves["release"]
        # A locked row is skipped: its transaction may postpone it further.
        held = select(t.c.id).where(named, unindexed(t.c.status) == _HELD)
        self._lock_held = held.with_for_update(skip_locked=True)
        in_waitlist = and_(entry.c.queue == bindparam("queue"), entry.c.tag == bindparam("tag"))
        self._any = select(literal(1)).select_from(entry).where(in_waitlist).limit(1)
        self._delete = delete(entry).where(in_waitlist, tuple_(*position).in_(listing("positions")))
        waits = and_(
            t.c.id == entry.c.task_id,
            t.c.version == entry.c.version,
            unindexed(t.c.status) == _HELD,
        )
        is_gone = t.c.id.is_(None).label("is_gone")
        is_later = (t.c.expected_time > db_now()).label("is_later")
        first = (
            select(*position, is_gone, is_later, t.c.lapses)
            .select_from(entry.outerjoin(t, waits))
            .where(in_waitlist)
            .order_by(key, entry.c.place, entry.c.due, entry.c.task_id)
            .limit(bindparam("most"))
        )
        self._first_of_key = first.where(key == bindparam("limit_key"))
        keys = select(key).where(in_waitlist).order_by(key).limit(1)
        # The keys: whether there was a turn before, and whether some keys have reached their limit.
        after, not_full = key > bindparam("after"), key.not_in(listing("full"))
        conditions: dict[tuple[bool, bool], list[Any]] = {
            (False, False): [],
            (False, True): [not_full],
            (True, False): [after],
            (True, True): [after, not_full],
        }
        self._next_key = {which: keys.where(*some) for which, some in conditions.items()}
        self._first = {which: first.where(*some) for which, some in conditions.items()}

    def hold(self, on: Connection, ids: Collection[int]) -> None:
        """Hold rows that this transaction has locked, and enter them into their waitlists."""
        if not ids:
            return
        named = {"ids": sorted(ids)}
        for statement in (self._hold, self._insert):
            check_row_count(on.execute(statement, named).rowcount, len(ids), "rows to hold")

    def release(self, on: Connection, ids: Sequence[int]) -> set[int]:
        """Release those of these held rows that no other transaction has locked."""
        if not ids:
            return set()
        locked = set(on.execute(self._lock_held, {"ids": ids}).scalars())
        if locked:
            released = on.execute(self._release, {"ids": sorted(locked)})
            check_row_count(released.rowcount, len(locked), "rows to release from a waitlist")
        return locked

    def has_entries(self, on: Connection, queue: str, tag: str) -> bool:
        return on.execute(self._any, {"queue": queue, "tag": tag}).first() is not None

    def next_key(self, on: Connection, where: Mapping[str, Any], after: str | None) -> str | None:
        """Return the first key after `after`, except those in `where["full"]`."""
        query = self._next_key[after is not None, bool(where["full"])]
        key: str | None = on.execute(query, {**where, "after": after}).scalar()
        return key

    def first(
        self, on: Connection, where: Mapping[str, Any], after: str | None, most: int
    ) -> Sequence[Any]:
        """Return the first entries of the keys after `after`, except those in `where["full"]`."""
        query = self._first[after is not None, bool(where["full"])]
        return on.execute(query, {**where, "after": after, "most": most}).all()

    def first_of_key(
        self, on: Connection, where: Mapping[str, Any], key: str, most: int
    ) -> Sequence[Any]:
        return on.execute(self._first_of_key, {**where, "limit_key": key, "most": most}).all()

    def remove(self, on: Connection, where: Mapping[str, Any], entries: Sequence[Any]) -> None:
        """Remove entries that one of the queries above has returned."""
        # No check of the row count: another transaction may have removed a stale entry.
        if entries:
            on.execute(
                self._delete, {**where, "positions": [tuple(entry[:5]) for entry in entries]}
            )


class BacklogQueries:
    """Overdue rows of limited tags. Two queries lock the rows, and return id, tag and key."""

    def __init__(self, database: Database, schema: Schema) -> None:
        t = schema.tasks
        tags: Any = listing("tags")
        is_due = and_(
            t.c.status == int(MOVES["hold"].source),
            is_narrow(t.c.queue, bindparam("queue", type_=String)),
            t.c.priority == bindparam("priority"),
            is_past(t.c.expected_time, db_now()),
        )
        key = func.coalesce(t.c.limit_key, "").label("limit_key")
        due = select(t.c.id, t.c.tag, key).where(is_due)
        oldest = due.order_by(t.c.expected_time).limit(OTHER_KEYS_AMONG).subquery()
        backlogs = tuple_(oldest.c.tag, oldest.c.limit_key).not_in(listing("backlogs"))
        others = select(oldest.c.id).where(oldest.c.tag.in_(tags), backlogs)
        self._others = others.limit(bindparam("most"))
        due = due.with_for_update(skip_locked=True)
        self._due = (
            due.where(t.c.tag.in_(tags)).order_by(t.c.expected_time).limit(bindparam("most"))
        )
        self._named = due.where(listed(database, t.c.id, "ids")).order_by(t.c.id)

    def due(self, on: Connection, where: Mapping[str, Any]) -> Sequence[Any]:
        """Lock the oldest rows of the tags."""
        return on.execute(self._due, where).all()

    def named(
        self, on: Connection, where: Mapping[str, Any], ids: Collection[int]
    ) -> Sequence[Any]:
        """Lock those of these rows that are still due."""
        return on.execute(self._named, {**where, "ids": sorted(ids)}).all()

    def others(
        self, on: Connection, where: Mapping[str, Any], backlogs: Collection[tuple[str, str]]
    ) -> Sequence[int]:
        """Return the ids of rows whose tag and key are not among `backlogs`."""
        return on.execute(self._others, {**where, "backlogs": sorted(backlogs)}).scalars().all()


class SlotTransfer:
    """One statement gives a settled task's slot to the next waiting one.

    For databases with array parameters; `admitted` holds the new values of an admitted row.
    """

    def __init__(
        self,
        database: Database,
        schema: Schema,
        admitted: Mapping[str, Any],
        columns: list[Column[Any]],
    ) -> None:
        self._schema = schema
        t, entry = schema.tasks, schema.waitlists
        waits = and_(
            t.c.id == entry.c.task_id,
            t.c.version == entry.c.version,
            unindexed(t.c.status) == _HELD,
        )
        first = (
            select(*entry.c)
            .join(t, waits)
            .where(
                entry.c.queue == bindparam("of_queue", type_=String),
                entry.c.tag == bindparam("of_tag", type_=String),
            )
            .where(t.c.lapses <= 0, t.c.expected_time <= db_now())
            .order_by(entry.c.limit_key, entry.c.place, entry.c.due, entry.c.task_id)
            .limit(1)
            .with_for_update(skip_locked=True, of=t)
        )

        def admit(query: Any) -> Prepared:
            picked = query.cte("picked")
            same = and_(
                *(entry.c[column.name] == picked.c[column.name] for column in entry.primary_key)
            )
            removed = delete(entry).where(same).cte("gone")
            ids = func.array(select(picked.c.task_id).scalar_subquery())
            statement = update(t).where(t.c.id == any_(ids)).values(admitted)
            return Prepared(database, statement.returning(*columns).add_cte(removed))

        after = entry.c.limit_key > bindparam("after", type_=String)
        self._admit_first, self._admit_next = admit(first), admit(first.where(after))

    def admit(self, on: Connection, queue: str, tag: str, after: str | None) -> DelayedTask | None:
        """Admit the first row of the key after `after`, except locked and recovered rows."""
        where = {"of_queue": queue, "of_tag": tag}
        rows = () if after is None else self._admit_next(on, {**where, "after": after}).rows
        rows = rows or self._admit_first(on, where).rows
        return task_of(rows[0], self._schema) if rows else None
