"""Builds the queries of claims, which choose named or due rows and claim them.

PostgreSQL and SQLite have `UPDATE ... RETURNING`, so one statement claims rows
(`OneStatementClaim`). In essence it is:

    WITH picked AS (
        SELECT id FROM yb_delay_task_message
        WHERE id = ANY(:ids) AND version = :version AND status = NOT_COMPLETE
          AND lapses <= :lapses AND expected_time <= now()
        ORDER BY id FOR UPDATE SKIP LOCKED  -- SQLite has one writer, and needs no lock
    )
    UPDATE yb_delay_task_message SET status = RUNNING, version = version + 1, ...
    WHERE id IN (SELECT id FROM picked) RETURNING ...

On PostgreSQL, `claim_version` gives the new version, and `commits_asynchronously` is one more
condition.

MariaDB and MySQL need two statements of one transaction (`TwoStatementClaim`):

    SELECT id, tag, message_body, ... FROM yb_delay_task_message
    WHERE id IN (:ids) AND version = :version AND status = NOT_COMPLETE
      AND lapses <= :lapses AND expected_time <= now()
    ORDER BY id FOR UPDATE SKIP LOCKED;

    UPDATE yb_delay_task_message SET status = RUNNING, version = version + 1, ...
    WHERE id IN (:locked_ids)

If a tag has limits, all databases first lock the rows as candidates, because some of them may have
to be held, and then claim the others by id. The docstring of `Claims` explains why two workers
cannot both win a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Integer,
    Select,
    String,
    and_,
    any_,
    bindparam,
    func,
    literal,
    select,
    update,
)

from delaytasks.core.body import dump_json
from delaytasks.core.states import Status
from delaytasks.storage.claim_statements import ClaimQuery, OneStatementClaim, TwoStatementClaim
from delaytasks.storage.database import Database
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.row_lists import (
    by_id,
    by_index,
    each_listed,
    json_rows,
    list_of,
    shared_name,
    shared_parameter,
    within_list,
)
from delaytasks.storage.rows import MAX_INTEGER, columns
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_table import hot_index
from delaytasks.storage.types import (
    UTCDateTime,
    commits_asynchronously,
    db_now,
    is_narrow,
    is_past,
    once,
    unindexed,
)

#: No row has more lapses.
ANY_LAPSES = MAX_INTEGER


class Candidate(NamedTuple):
    """A due row that a claim has locked; the fields are named as the columns."""

    id: int
    tag: str
    queue: str
    priority: int
    expected_time: datetime
    concurrency_key: str | None


class ClaimQueries:
    """`claimed` has the new values of a claimed row, `whole` the columns to return."""

    def __init__(
        self,
        database: Database,
        schema: Schema,
        claimed: Mapping[str, Any],
        whole: Sequence[Column[Any]],
    ) -> None:
        self._db = database
        self._schema = schema
        self._t = schema.tasks
        self._claimed = claimed
        self._whole = whole
        self._candidate = columns(schema, Candidate._fields)
        waiting: ColumnElement[int] = literal(int(Status.NOT_COMPLETE))
        queue, priority = (
            bindparam("due_queue", type_=String),
            bindparam("due_priority", type_=Integer),
        )
        self._level = waiting, queue, priority
        locked = update(schema.tasks).where(each_listed(database, schema.tasks.c.id))
        self._claim_locked = Prepared(database, locked.values(claimed).returning(*whole))
        self._any_version = self._query(self._named_by_rows(), is_planned_once=True)
        #: For rows that have the same version.
        self._same_version = (
            self._query(self._named_by_list(), is_planned_once=True)
            if database.can.looks_up_lists
            else None
        )
        # Planned at each execution, because a kept plan would guess the number of due rows.
        self._due, self._due_from = (
            self._query(self._oldest_due(due_from))
            for due_from in (None, bindparam("due_from", type_=UTCDateTime()))
        )
        self._recovered = self._query(self._fewest_lapses())

    # -- the query and its parameters -------------------------------------------------------------

    def named(
        self,
        pairs: Sequence[tuple[int, int]],
        lapses: int = 0,
        status: Status = Status.NOT_COMPLETE,
    ) -> tuple[ClaimQuery, dict[str, Any]]:
        """Choose the ids and versions that are due, with at most `lapses` lost leases."""
        pairs = sorted(set(pairs))  # a row that is named twice would be found twice
        ids, shared = [id for id, _ in pairs], {"status": int(status), "lapses": lapses}
        if self._same_version is not None and len({version for _, version in pairs}) == 1:
            values = {**shared, "version": pairs[0][1]}
            return self._same_version, list_of(self._db, ids) | {
                shared_name(name): values[name] for name in values
            }
        parameters: dict[str, Any] = {
            "rows": dump_json([{"id": id, "version": v, **shared} for id, v in pairs])
        }
        if self._db.can.array_parameters:
            parameters |= list_of(self._db, ids)
        return self._any_version, parameters

    def due(
        self, queue: str, priority: int, due_from: datetime | None, limit: int
    ) -> tuple[ClaimQuery, dict[str, Any]]:
        """Choose the oldest due rows that have lost no lease."""
        level = {"due_queue": queue, "due_priority": priority, "due_limit": limit}
        return (
            (self._due, level)
            if due_from is None
            else (self._due_from, {**level, "due_from": due_from})
        )

    def recovered(self, queue: str, priority: int) -> tuple[ClaimQuery, dict[str, Any]]:
        """Choose the due row that lost the fewest leases, of these the oldest."""
        return self._recovered, {"due_queue": queue, "due_priority": priority}

    # -- statements -------------------------------------------------------------------------------

    def _named_by_rows(self) -> Select[Any]:
        t = self._t
        # Columns, although most have the same value in all rows: with constants planners would
        # expect one row, and compare all rows with each other.
        w = json_rows(self._db, ("id", "version", "status", "lapses"))
        chosen = self._fenced(w.c.version, t.c.status == w.c.status, w.c.lapses).join(
            w, t.c.id == w.c.id
        )
        if self._db.can.array_parameters:
            chosen = chosen.where(each_listed(self._db, t.c.id))
        return chosen

    def _named_by_list(self) -> Select[Any]:
        t, version, status, lapses = (
            self._t,
            *map(shared_parameter, ("version", "status", "lapses")),
        )
        chosen = self._fenced(version, unindexed(t.c.status) == status, lapses)
        return by_id(chosen.where(each_listed(self._db, t.c.id)), t)

    def _fenced(
        self,
        version: ColumnElement[int],
        has_status: ColumnElement[bool],
        lapses: ColumnElement[int],
    ) -> Select[Any]:
        t = self._t
        is_so = and_(t.c.version == version, has_status, t.c.lapses <= lapses)
        return select(*self._candidate).where(is_so, t.c.expected_time <= db_now()).order_by(t.c.id)

    def _oldest_due(self, due_from: ColumnElement[datetime] | None) -> Select[Any]:
        t = self._t
        chosen = (
            self._waiting()
            .where(self._is_due(due_from), t.c.lapses <= 0)
            .order_by(t.c.expected_time)
        )
        return chosen.limit(bindparam("due_limit"))

    def _is_due(self, due_from: ColumnElement[datetime] | None) -> ColumnElement[bool]:
        t, until = self._t, once(db_now())
        return (
            t.c.expected_time <= until
            if due_from is None
            else t.c.expected_time.between(due_from, until)
        )

    def _fewest_lapses(self) -> Select[Any]:
        t = self._t
        chosen = self._waiting().where(is_past(t.c.expected_time, db_now()), t.c.lapses > 0)
        # In the order of time alone MySQL would also read the index of all past rows.
        return chosen.order_by(t.c.lapses, t.c.expected_time).limit(1)

    def _waiting(self) -> Select[Any]:
        t, (status, queue, priority) = self._t, self._level
        waiting = select(*self._candidate).where(
            t.c.status == status, is_narrow(t.c.queue, queue), t.c.priority == priority
        )
        # MySQL would rather scan a small table. It locks each row that it reads for a moment, and
        # a claim of another queue would skip the row meanwhile.
        return by_index(waiting, t, hot_index(t))

    def _query(self, candidates: Select[Any], is_planned_once: bool = False) -> ClaimQuery:
        t = self._t
        candidates = candidates.with_for_update(
            skip_locked=True, of=t if self._db.can.update_returning else None
        )
        lock_candidates = Prepared(self._db, candidates, is_planned_once)
        if not self._db.can.update_returning:
            whole = candidates.with_only_columns(*self._whole, maintain_column_froms=True)
            lock = Prepared(self._db, whole)
            return TwoStatementClaim(
                self._db, self._schema, lock_candidates, lock, self._claimed, self._whole
            )
        picked = candidates.cte("picked")
        mine: ColumnElement[bool] = t.c.id.in_(select(picked.c.id))
        if self._db.can.array_parameters:
            # The array is made first, so that the planner can only look up each id.
            mine = t.c.id == any_(func.array(select(picked.c.id).scalar_subquery()))
            if is_planned_once:
                mine = and_(mine, within_list(t.c.id))
        claim = update(t).where(mine).values(self._claimed).returning(*self._whole)
        claim_and_commit = claim
        if self._db.can.asynchronous_commit:
            claim_and_commit = claim.where(commits_asynchronously())
        return OneStatementClaim(
            self._db,
            self._schema,
            lock_candidates,
            Prepared(self._db, claim, is_planned_once),
            Prepared(self._db, claim_and_commit, is_planned_once),
            self._claim_locked,
        )
