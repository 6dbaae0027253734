"""Claims: NOT_COMPLETE to RUNNING, by ids or by due time, in one statement where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeAlias

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

from delaytasks.db.database import Database
from delaytasks.db.row_lists import (
    Prepared,
    by_id,
    by_index,
    check_row_count,
    each_listed,
    json_rows,
    list_of,
    shared_name,
    shared_parameter,
    within_list,
)
from delaytasks.db.rows import (
    CLAIMED,
    MAX_INTEGER,
    claim_version,
    columns,
    moved,
    one_more,
    task_of,
)
from delaytasks.db.schema import Schema, hot_index
from delaytasks.db.settlements import Settlements
from delaytasks.db.types import (
    UTCDateTime,
    commits_asynchronously,
    db_now,
    db_now_plus,
    is_narrow,
    is_past,
    once,
    unindexed,
)
from delaytasks.model.body import dump_json
from delaytasks.model.clock import monotonic, to_us
from delaytasks.model.inputs import MAX_PRIORITY
from delaytasks.model.moves import MOVES, Status, following
from delaytasks.model.policies import NO_WAITLISTS, WaitlistsSeen
from delaytasks.model.task import (
    CallerConnection,
    Claimed,
    DelayedTask,
    Entry,
    Settlement,
    UnclaimedRow,
)

# -- How far a process has claimed the rows of each queue and priority ----------------------------

# A claimed row leaves a dead entry in the index. The database cannot remove it while an older
# transaction is open, such as a backup's. Walking past all dead entries would slow down every
# chunk, so a chunk continues where the last one ended. Rows with older due times may come back
# meanwhile: the index is searched from its beginning now and then, and before a level is reported
# as empty.


#: After this time a search starts at the beginning of the index again.
RESTART_S = 5.0
#: Claims up to a number of rows whose due time is this one or later; None is the beginning, since
#: other programs' rows may be due before the year 1.
ClaimFrom = Callable[[datetime | None, int], Claimed]


class Backlog:
    def __init__(self) -> None:
        #: The due time that was reached in each queue and priority, and until when searches start
        #: at it.
        self._reached: dict[tuple[str, int], tuple[datetime | None, float]] = {}

    def claim(self, queue: str, priority: int, limit: int, claim: ClaimFrom) -> Claimed:
        """Claim up to `limit` due rows of a queue and priority from where the last claim ended."""
        level = queue, priority
        reached, until = self._reached.get(level, (None, 0.0))
        now = monotonic()
        due_from = reached if now < until else None
        claimed = claim(due_from, limit)
        if due_from is not None and len(claimed) < limit:
            claimed = Claimed([*claim(None, limit - len(claimed)), *claimed])
        if claimed and len(claimed) >= limit:
            latest = max(task.expected_time for task in claimed)
            self._reached[level] = latest, until if now < until else now + RESTART_S
        else:
            self._reached.pop(level, None)
        return claimed


# -- Claims rows in one statement, or in two where the database has no `UPDATE ... RETURNING` -----

# The docstring of `delaytasks.db.claims` shows the statements.


ROWS_TO_CLAIM = "rows to claim"


@dataclass(frozen=True)
class OneStatementClaim:
    """Claims rows that are chosen in one way, with `UPDATE ... RETURNING`."""

    database: Database
    schema: Schema
    #: Locks the rows, and returns a `Candidate` of each, for tags with limits.
    lock_candidates: Prepared
    #: Chooses, claims and returns the rows.
    statement: Prepared
    #: The same statement for a transaction of its own, which commits asynchronously if the database
    #: can.
    committing_statement: Prepared
    #: Claims and returns locked rows by their ids.
    locked_statement: Prepared

    def claim(self, on: Any, parameters: Mapping[str, Any]) -> list[DelayedTask]:
        """Claim the rows in the transaction of the connection `on`."""
        return [task_of(row, self.schema) for row in self.statement(on, parameters).rows]

    def claim_and_commit(self, parameters: Mapping[str, Any]) -> list[DelayedTask]:
        """Claim the rows in a transaction of its own."""
        claim = partial(self.committing_statement, values=parameters)
        return [task_of(row, self.schema) for row in self.database.autocommitted(claim).rows]

    def claim_locked(self, on: Any, ids: list[int]) -> list[DelayedTask]:
        """Claim these rows, which the transaction of `on` has locked. They may be held rows."""
        rows = self.locked_statement(on, list_of(self.database, ids)).rows
        check_row_count(len(rows), len(ids), ROWS_TO_CLAIM)
        return [task_of(row, self.schema) for row in rows]


@dataclass(frozen=True)
class TwoStatementClaim:
    """Claims rows that are chosen in one way: a SELECT locks them, then an UPDATE claims them.

    The tasks are made from the rows as they were before the UPDATE, which saves another read.
    """

    database: Database
    schema: Schema
    #: Locks the rows, and returns a `Candidate` of each, for tags with limits.
    lock_candidates: Prepared
    #: Locks the rows, and returns the columns that a worker needs.
    lock: Prepared
    #: The values that the UPDATE sets.
    claimed: Mapping[str, Any]
    #: The columns that a worker needs.
    whole: Sequence[Column[Any]]

    def claim(self, on: Any, parameters: Mapping[str, Any]) -> list[DelayedTask]:
        """Claim the rows in the transaction of the connection `on`."""
        return self._claimed_tasks(self._lock_and_update(on, parameters))

    def claim_and_commit(self, parameters: Mapping[str, Any]) -> list[DelayedTask]:
        """Claim the rows in a transaction of its own."""
        rows = self.database.transaction(lambda c: self._lock_and_update(c, parameters))
        return self._claimed_tasks(rows)

    def _lock_and_update(self, on: Any, parameters: Mapping[str, Any]) -> Sequence[Any]:
        rows = self.lock(on, parameters).rows
        if rows:
            self._update(on, [row[0] for row in rows])
        return rows

    def claim_locked(self, on: Any, ids: list[int]) -> list[DelayedTask]:
        """Claim these rows, which the transaction of `on` has locked. They may be held rows."""
        self._update(on, ids)
        found = select(*self.whole).where(self.schema.tasks.c.id.in_(ids))
        return [task_of(row, self.schema) for row in on.execute(found)]

    def _update(self, on: Any, ids: Sequence[int]) -> None:
        t = self.schema.tasks
        claim = update(t).where(t.c.id.in_(ids)).values(self.claimed)
        check_row_count(on.execute(by_id(claim, t)).rowcount, len(ids), ROWS_TO_CLAIM)

    def _claimed_tasks(self, rows: Sequence[Any]) -> list[DelayedTask]:
        """Return the tasks with the changes that the UPDATE made to these rows."""
        tasks = [task_of(row, self.schema) for row in rows]
        for task in tasks:
            task.status, task.version = MOVES["claim"].target, following(task.version)
            task.runs = min(task.runs + 1, MAX_INTEGER)
        return tasks


ClaimQuery: TypeAlias = OneStatementClaim | TwoStatementClaim


# -- Builds the queries of claims, which choose named or due rows and claim them ------------------

# PostgreSQL and SQLite have `UPDATE ... RETURNING`, so one statement claims rows
# (`OneStatementClaim`). In essence it is:
#
#     WITH picked AS (
#         SELECT id FROM yb_delay_task_message
#         WHERE id = ANY(:ids) AND version = :version AND status = NOT_COMPLETE
#           AND lapses <= :lapses AND expected_time <= now()
#         ORDER BY id FOR UPDATE SKIP LOCKED  -- SQLite has one writer, and needs no lock
#     )
#     UPDATE yb_delay_task_message SET status = RUNNING, version = version + 1, ...
#     WHERE id IN (SELECT id FROM picked) RETURNING ...
#
# On PostgreSQL, `claim_version` gives the new version, and `commits_asynchronously` is one more
# condition.
#
# MariaDB and MySQL need two statements of one transaction (`TwoStatementClaim`):
#
#     SELECT id, tag, message_body, ... FROM yb_delay_task_message
#     WHERE id IN (:ids) AND version = :version AND status = NOT_COMPLETE
#       AND lapses <= :lapses AND expected_time <= now()
#     ORDER BY id FOR UPDATE SKIP LOCKED;
#
#     UPDATE yb_delay_task_message SET status = RUNNING, version = version + 1, ...
#     WHERE id IN (:locked_ids)
#
# If a tag has limits, all databases first lock the rows as candidates, because some of them may
# have to be held, and then claim the others by id. The docstring of `Claims` explains why two
# workers cannot both win a row.


#: No row has more lapses.
ANY_LAPSES = MAX_INTEGER


class Candidate(NamedTuple):
    """A due row that a claim has locked; the fields are named as the columns."""

    id: int
    tag: str
    queue: str
    priority: int
    expected_time: datetime
    limit_key: str | None


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


#: Holds those of the locked rows for which there is no capacity. Returns the ids of the other ones.
HoldExcess = Callable[[Any, Sequence[Candidate]], tuple[list[int], WaitlistsSeen]]


class Claims:
    """The claims of one process; `worker` and `ip` are written into the rows.

    `limits` returns what holds the rows beyond the limits of their tags, or None while no tag has
    limits.

    Two workers cannot both win a row, although both may have its message. Each claim locks the rows
    that it chooses, and checks under the lock that their status is NOT_COMPLETE and, for a row that
    a message names, that their version is still the one in the message:

    - While the first worker has the lock, the second one skips the row (`SKIP LOCKED`). SQLite has
      one writer at a time, so the second worker waits for the first one's commit.
    - After the first worker's commit, the row is RUNNING, and its version is higher. The second
      worker's condition no longer matches, so it gets no row.
    - Lock, check and change are one statement, or statements of one transaction where the database
      has no `UPDATE ... RETURNING` or a tag has limits. Therefore no worker acts on an old check.

    A worker that loses its lease loses the row by the same version: recovering the row changes the
    version, so a later settlement of the first worker changes no row (`Settlements`).

    On PostgreSQL, a claim without limits does not wait for the disk. If the server crashes within
    the next moments, the row waits again as before the claim, and another worker claims it. The
    first worker's settlement then changes no row either, because no two claims have the same
    version (`claim_version`).
    """

    def __init__(
        self,
        database: Database,
        schema: Schema,
        worker: str,
        ip: int | None,
        lease_s: float,
        limits: Callable[[], HoldExcess | None],
    ) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._schema = schema
        self._limits = limits
        self.columns = columns(schema, CLAIMED)
        # `TwoStatementClaim._claimed_tasks` makes the same changes to the tasks that it returns.
        self._claimed = moved(
            t,
            "claim",
            version=claim_version(t.c.version, database.can),
            runs=one_more(t.c.runs),
            execution_time=db_now(),
            lease_until=db_now_plus(lease_s),
            worker=worker,
            ip_address=ip,
        )
        #: An admitted row gets the same values as a claimed one.
        self.admitted = {**self._claimed, "status": int(MOVES["admit"].target)}
        self._claim_queries = ClaimQueries(database, schema, self._claimed, self.columns)
        self._backlog = Backlog()
        self._settlements = Settlements(database, schema, worker)

    # -- claim ------------------------------------------------------------------------------------

    def claim(self, entries: Sequence[Entry]) -> Claimed:
        """Claim the entries that are due, unchanged and not locked. Recovered rows are left out."""
        if not entries:
            return Claimed()
        pairs = [(entry.id, entry.version) for entry in entries]
        return self._claim(*self._claim_queries.named(pairs))

    def claim_alone(self, id: int, version: int) -> Claimed:
        """Claim one row, even a recovered one, which may kill its worker."""
        return self._claim(*self._claim_queries.named([(id, version)], ANY_LAPSES))

    def claim_due(self, queue: str, priorities: Sequence[int], limit: int) -> Claimed:
        """Claim the oldest due rows of the highest priorities, without messages: at most `limit`
        rows of all priorities together."""
        claimed = Claimed()
        for priority in sorted(priorities, reverse=True):
            claimed.add(self._claim_level(queue, priority, limit - len(claimed)))
            if len(claimed) >= limit:
                break
        return claimed

    def _claim_level(self, queue: str, priority: int, limit: int) -> Claimed:
        def claim(due_from: datetime | None, most: int) -> Claimed:
            return self._claim(*self._claim_queries.due(queue, priority, due_from, most))

        if self._limits() is not None:  # the claim holds some of the rows that it finds
            return claim(None, limit)
        return self._backlog.claim(queue, priority, limit, claim)

    def claim_recovered(
        self, queue: str, priorities: Sequence[int] = range(MAX_PRIORITY + 1)
    ) -> Claimed:
        """Claim the due row of the highest priority that lost the fewest leases.

        Each priority has a query of its own. One query for all would read the index of all rows
        that wait in the queue, however far in the future.
        """
        seen = NO_WAITLISTS
        for priority in sorted(priorities, reverse=True):
            claimed = self._claim(*self._claim_queries.recovered(queue, priority))
            seen = seen.merge(claimed.seen)
            if claimed:
                return Claimed(claimed, seen)
        return Claimed((), seen)

    def _claim(self, query: ClaimQuery, parameters: dict[str, Any]) -> Claimed:
        hold_excess = self._limits()
        if hold_excess is not None:
            within_limits = partial(self._claim_within_limits, query, parameters, hold_excess)
            tasks, seen = self._db.transaction(within_limits)
            return Claimed(_in_order(tasks), seen)
        return Claimed(_in_order(query.claim_and_commit(parameters)))

    def _claim_within_limits(
        self, query: ClaimQuery, parameters: dict[str, Any], hold_excess: HoldExcess, on: Any
    ) -> tuple[list[DelayedTask], WaitlistsSeen]:
        candidates = [Candidate(*row) for row in query.lock_candidates(on, parameters).rows]
        starting, seen = hold_excess(on, candidates)
        return query.claim_locked(on, sorted(starting)) if starting else [], seen

    def admit(self, on: Any, pairs: Sequence[tuple[int, int]]) -> list[DelayedTask]:
        """Admit those held rows (id and version) that no other transaction has locked."""
        query, parameters = self._claim_queries.named(pairs, ANY_LAPSES, MOVES["admit"].source)
        return _in_order(query.claim(on, parameters))

    def unclaimed(self, ids: Iterable[int]) -> list[UnclaimedRow]:
        """Return the present state of rows that a claim did not get."""
        t, wanted = self._t, list(ids)
        if not wanted:
            return []
        query = select(t.c.id, t.c.version, t.c.status, t.c.expected_time, t.c.lapses).where(
            t.c.id.in_(wanted)
        )
        rows = self._db.autocommitted(lambda c: c.execute(query).all())
        return [UnclaimedRow(row[0], row[1], Status(row[2]), to_us(row[3]), row[4]) for row in rows]

    # -- settle -----------------------------------------------------------------------------------

    def settle(self, settlements: Sequence[Settlement], on: Any = None) -> set[int]:
        """Settle rows, in the transaction of the connection `on` if it is given.

        Return the ids that were accepted. This process had lost the leases of the other ones.
        """
        return self._settlements.settle(settlements, on)

    def complete(self, task: DelayedTask, result: str | None, on: CallerConnection) -> bool:
        """Settle a running task in its processor's own transaction.

        Return False if its lease was lost.
        """
        return self._settlements.complete(task, result, on)


def _in_order(tasks: Iterable[DelayedTask]) -> list[DelayedTask]:
    """Sort tasks by the order in which a process runs them."""
    return sorted(tasks, key=lambda task: (-task.priority, task.expected_time, task.id))
