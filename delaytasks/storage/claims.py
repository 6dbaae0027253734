"""Claims due rows for one process, and settles the rows that it has run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import select

from delaytasks.core.clock import to_us
from delaytasks.core.inputs import MAX_PRIORITY
from delaytasks.core.interfaces import CallerConnection, Claimed, Entry, Settlement, UnclaimedRow
from delaytasks.core.policies import NO_WAITLISTS, WaitlistsSeen
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.backlog import Backlog
from delaytasks.storage.claim_queries import ANY_LAPSES, Candidate, ClaimQueries
from delaytasks.storage.claim_statements import ClaimQuery
from delaytasks.storage.database import Database
from delaytasks.storage.rows import (
    CLAIMED,
    claim_version,
    columns,
    moved,
    one_more,
)
from delaytasks.storage.schema import Schema
from delaytasks.storage.settlements import Settlements
from delaytasks.storage.types import db_now, db_now_plus

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
            attempts=one_more(t.c.attempts),
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
    ) -> tuple[list[DelayTask], WaitlistsSeen]:
        candidates = [Candidate(*row) for row in query.lock_candidates(on, parameters).rows]
        starting, seen = hold_excess(on, candidates)
        return query.claim_locked(on, sorted(starting)) if starting else [], seen

    def admit(self, on: Any, pairs: Sequence[tuple[int, int]]) -> list[DelayTask]:
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

    def complete(self, task: DelayTask, result: str | None, on: CallerConnection) -> bool:
        """Settle a running task in its processor's own transaction.

        Return False if its lease was lost.
        """
        return self._settlements.complete(task, result, on)


def _in_order(tasks: Iterable[DelayTask]) -> list[DelayTask]:
    """Sort tasks by the order in which a process runs them."""
    return sorted(tasks, key=lambda task: (-task.priority, task.expected_time, task.id))
