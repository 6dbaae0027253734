"""Bulk operations in small steps, and the audit table that records them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    Update,
    bindparam,
    case,
    delete,
    func,
    select,
    update,
)

from delaytasks.db.database import Database
from delaytasks.db.schema import (
    Schema,
    by_id,
    check_row_count,
    instant_text,
    json_rows,
    listed,
    moved,
)
from delaytasks.db.statements import insert_if_absent
from delaytasks.db.task_rows import TaskKeys, conditions, has_status, queue_levels
from delaytasks.db.types import db_now, db_now_plus, unindexed
from delaytasks.model.body import dump_json
from delaytasks.model.clock import EARLIEST, MAX_ID, to_us
from delaytasks.model.filters import BulkFilter, Filter, LogEntry, To, new_due
from delaytasks.model.inputs import Spread
from delaytasks.model.moves import Status, following
from delaytasks.model.task import Entry


class Audit:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._a = schema.audit

    def begin(self, entry: LogEntry) -> None:
        """Write the row before any task is moved, so that an operation that dies is visible."""
        values = {column.name: getattr(entry, column.name) for column in self._a.c}
        values["filter"] = json.dumps(entry.filter, ensure_ascii=False, separators=(",", ":"))
        # An earlier try, whose answer was lost, may have written it.
        writing = insert_if_absent(self._db, self._a, self._a.c.id).values(values)
        self._db.autocommitted(lambda c: c.execute(writing))

    def counts(self, on: Any, id: int) -> tuple[int, int] | None:
        """Return how many tasks an operation has changed and refused; None if its row is gone."""
        a = self._a.c
        row = on.execute(select(a.changed, a.refused).where(a.id == id)).first()
        return None if row is None else (row[0], row[1])

    def note(self, id: int, done: tuple[int, int] | None, on: Any = None, **others: Any) -> None:
        """Write what an operation has changed and refused, if it is known."""
        values = {"seen_at": db_now(), **others}
        if done is not None:
            values |= {"changed": done[0], "refused": done[1]}
        noting = update(self._a).where(self._a.c.id == id).values(values)
        self._db.autocommitted(lambda c: c.execute(noting), on)

    def end(self, id: int, state: str, done: tuple[int, int] | None) -> None:
        self.note(id, done, state=state, finished_at=db_now())

    def get(self, id: int) -> LogEntry | None:
        return next(iter(self._entries(select(self._a).where(self._a.c.id == id))), None)

    def all(self, limit: int, before: int | None = None) -> list[LogEntry]:
        """Return the newest rows first, by their ids; only those with ids below `before`."""
        rows = select(self._a).where(self._a.c.id < (MAX_ID if before is None else before))
        return self._entries(rows.order_by(self._a.c.id.desc()).limit(limit))

    def _entries(self, query: Select[Any]) -> list[LogEntry]:
        return [
            LogEntry(**{**row._mapping, "filter": json.loads(row._mapping["filter"])})
            for row in self._db.rows(query)
        ]

    def purge(self, older_than_s: float) -> None:
        old = delete(self._a).where(self._a.c.seen_at < db_now_plus(-older_than_s))
        self._db.autocommitted(lambda c: c.execute(old))


# -- bulk -----------------------------------------------------------------------------------------

# Moves many rows for an operator: finds them window by window, and moves some hundreds at a time.
#
# Nothing here waits for a lock or reads a table as a whole. Rows are found without locks, through
# an index by due time. Then each step locks rows by their ids, and moves those that still match
# the filter.


EVERYTHING = Filter()
#: Rows that one statement reads, plus those with the same due time as the last of them.
WINDOW = 20_000


class Step(NamedTuple):
    """The result of one step of a bulk command, which changes some hundreds of tasks."""

    #: The moved tasks, with their new versions.
    moved: list[Entry]
    #: The number of tasks that have moved since, or that the filter no longer matches.
    refused: int
    #: The ids of tasks that other transactions have locked, or whose keys they have locked.
    busy: list[int]
    #: Id, version and due time of the tasks that must get their keys back first.
    keyed: list[tuple[int, int, datetime]]


class Bulk:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._keys = TaskKeys(database, schema)
        self.audit = Audit(database, schema)
        self._updates = {name: self._update(name) for name in ("cancel", "reschedule", "rerun")}

    # -- find -------------------------------------------------------------------------------------

    def matching(self, which: BulkFilter) -> Iterator[list[tuple[int, Status]]]:
        """Yield (id, status) of the rows that the filter names, one window at a time.

        A row that moves meanwhile may be missed.
        """
        query = select(self._t.c.id, self._t.c.status).where(*self._matches(which))
        if which.where.ids is None:
            parts = self._windows(query, which)
        else:
            query = query.where(self._is(which.looked_at))
            parts = iter([self._db.rows(by_id(query, self._t))])
        for rows in parts:
            yield [(row[0], Status(row[1])) for row in rows]

    def _levels(
        self, statuses: frozenset[Status], queue: str | None
    ) -> Iterator[Sequence[ColumnElement[bool]]]:
        """Yield the parts of the table that an index has in the order of due times.

        Rows are found without reading those that are DONE, of which there are far more.
        """
        t = self._t.c
        for status in sorted(statuses):
            here = has_status(self._t, status)
            read = partial(queue_levels, t=self._t, status=status, queue=queue)
            for level in self._db.autocommitted(read):
                yield here, t.queue == level.queue, t.priority == level.priority

    def _windows(self, matching: Select[Any], which: BulkFilter) -> Iterator[Sequence[Any]]:
        due, where = self._t.c.expected_time, which.where
        for level in self._levels(which.looked_at, where.queue):
            query = matching.where(*level).order_by(due)
            begin: ColumnElement[bool] = due >= (where.since or EARLIEST)
            while True:
                end = select(due).where(*level, begin).order_by(due).offset(WINDOW - 1).limit(1)
                ends = self._db.rows(end if where.until is None else end.where(due < where.until))
                yield self._db.rows(query.where(begin, *(due <= row[0] for row in ends)))
                if not ends:
                    break
                begin = due > ends[0][0]

    def _matches(self, which: BulkFilter) -> list[ColumnElement[bool]]:
        """Return the conditions of the filter, except that of the status."""
        found = conditions(self._t, which.where, self._db.can)
        if which.cancelled_by is not None:
            found.append(self._t.c.cancel_request == which.cancelled_by)
        return found

    def _listed(self, which: BulkFilter, columns: Sequence[ColumnElement[Any]]) -> Select[Any]:
        """Return the query of the listed rows that still match the filter and can be moved."""
        t = self._t.c
        # The filter by ids has found the listed rows. With two lists PostgreSQL may scan the table.
        unlisted = replace(which, where=replace(which.where, ids=None))
        matches = self._is(which.movable), *self._matches(unlisted)
        return select(*columns).where(listed(self._db, t.id, "ids"), *matches).order_by(t.id)

    def _is(self, statuses: frozenset[Status]) -> ColumnElement[bool]:
        return unindexed(self._t.c.status).in_(sorted(map(int, statuses)))

    # -- move -------------------------------------------------------------------------------------

    def step(
        self, run: int, which: BulkFilter, ids: Sequence[int], to: To, done: tuple[int, int]
    ) -> Step:
        """Move these rows if they still match the filter.

        `done` is what the audit row of the operation counts. It is updated in the same transaction,
        so a step whose answer was lost is not done again.
        """
        tried: list[Step] = []

        def work(connection: Any) -> Step:
            counts = self.audit.counts(connection, run)
            if tried and counts not in (None, done):
                return tried[-1]
            step = self._step(connection, which, ids, to, run)
            tried.append(step)
            counted = done[0] + len(step.moved), done[1] + step.refused
            self.audit.note(run, counted, connection)
            return step

        return self._db.transaction(work)

    def cancel(self, on: Any, ids: Sequence[int]) -> Step:
        """Cancel those of these tasks that wait and that no other transaction has locked."""
        return self._step(on, BulkFilter("cancel", EVERYTHING), ids, None, None)

    def _step(
        self, on: Any, which: BulkFilter, ids: Sequence[int], to: To, run: int | None
    ) -> Step:
        t, is_rerun = self._t.c, which.move == "rerun"
        due = func.coalesce(t.due_time, t.expected_time).label("due")
        key = t.id, t.tag, t.task_key
        rows = self._listed(which, [*key, t.version, t.expected_time, t.queue, t.priority, due])
        seen = on.execute(rows, {"ids": ids}).all()
        with_key = [row for row in seen if row.task_key is not None]
        left_out = (
            {row.id for row in with_key} if is_rerun else self._busy_keys(on, which.move, with_key)
        )
        locked = self._lock(on, rows, [row.id for row in seen if row.id not in left_out])
        moved = self._moved(on, which.move, locked, to, run)
        if which.move == "cancel":
            taken = {entry.id for entry in moved}
            self._keys.release_all(on, [row for row in with_key if row.id in taken])
        keyed = [(row.id, row.version, row.due) for row in with_key] if is_rerun else []
        taken = {row[0] for row in [*locked, *keyed]}
        busy = [row.id for row in seen if row.id not in taken]
        return Step(moved, len(ids) - len(moved) - len(busy) - len(keyed), busy, keyed)

    def _busy_keys(self, on: Any, move: str, with_key: Sequence[Any]) -> set[int]:
        """Lock keys before tasks, as every transaction does. Return tasks whose keys are locked
        elsewhere."""
        if move != "cancel" or not with_key:
            return set()
        locked = {row[0] for row in self._keys.lock_all(on, with_key)}
        others = [row for row in with_key if row[0] not in locked]
        return {row[0] for row in self._keys.owned(on, others)}

    def _lock(self, on: Any, rows: Select[Any], ids: list[int]) -> list[Any]:
        locking = rows.with_for_update(skip_locked=True)
        return list(on.execute(locking, {"ids": ids})) if ids else []

    def _moved(
        self, on: Any, move: str, locked: Sequence[Any], to: To, run: int | None
    ) -> list[Entry]:
        """Move the locked rows, fenced by the versions that were read."""
        is_relative = isinstance(to, timedelta | Spread)
        now = on.execute(select(db_now())).scalar_one() if is_relative else None
        rows, entries = [], []
        for row in locked:
            new, version = new_due(row.id, row.due, to, now), following(row.version)
            due_text = instant_text(self._db, new)
            rows.append({"id": row.id, "version": row.version, "expected_time": due_text})
            due_us = to_us(new or row.expected_time)
            entries.append(Entry(row.id, version, due_us, row.queue, row.priority))
        if rows:
            named = {
                "rows": dump_json(rows),
                "ids": [entry.id for entry in entries],
                # By it a rerun finds the tasks that this operation has cancelled.
                "cancelled_by": run if move == "cancel" else None,
            }
            changed = on.execute(self._updates[move], named).rowcount
            check_row_count(changed, len(rows), f"tasks to {move}")
        return entries

    def _update(self, move: str) -> Update:
        t, w = self._t, json_rows(self._db, ("id", "version", "expected_time"))
        values = moved(
            t,
            move,
            expected_time=func.coalesce(w.c.expected_time, t.c.expected_time),
            due_time=case((w.c.expected_time.is_(None), t.c.due_time), else_=None),
            late_by=case((w.c.expected_time.is_(None), t.c.late_by), else_=None),
            cancel_request=bindparam("cancelled_by", type_=BigInteger),
            **({"runs": 0, "lapses": 0} if move == "rerun" else {}),
        )
        mine = listed(self._db, t.c.id, "ids")  # else a small table would be scanned
        return update(t).where(mine, t.c.id == w.c.id, t.c.version == w.c.version).values(values)
