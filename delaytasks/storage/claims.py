"""Rows as workers see them: claimed, one statement for many rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select, update

from delaytasks.core.clock import to_us
from delaytasks.core.inputs import MAX_PRIORITY
from delaytasks.core.interfaces import Entry, Executor, Miss, Settlement
from delaytasks.core.states import MOVES, Status, following
from delaytasks.core.task import DelayTask
from delaytasks.storage.backlog import Backlog
from delaytasks.storage.claim_queries import ANY_LAPSES, ClaimQueries, ClaimQuery
from delaytasks.storage.database import Database
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.rows import (
    CLAIMED,
    MOST,
    columns,
    each_listed,
    list_of,
    next_version,
    one_more,
    task_of,
)
from delaytasks.storage.schema import Schema
from delaytasks.storage.settlements import Settlements
from delaytasks.storage.slot_transfer import SlotTransfer
from delaytasks.storage.types import db_now, db_now_plus
from delaytasks.storage.waitlist import Candidate, Limited, Waitlist


class Claims:
    """Claims for one worker process, whose name and address its rows carry."""

    def __init__(
        self,
        database: Database,
        schema: Schema,
        worker: str,
        ip: int | None,
        lease_s: float,
        limited: Limited,
    ) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._schema = schema
        self._columns = columns(schema, CLAIMED)
        self._claimed = {
            "status": int(MOVES["claim"].target),
            "version": next_version(t.c.version),
            "attempts": one_more(t.c.attempts),
            "execution_time": db_now(),
            "lease_until": db_now_plus(lease_s),
            "update_time": db_now(),
            "worker": worker,
            "ip_address": ip,
        }
        self._claim_queries = ClaimQueries(database, schema, self._claimed, self._columns)
        taking = update(t).where(each_listed(database, t.c.id)).values(self._claimed)
        self._taking = Prepared(database, taking.returning(*self._columns))
        self._backlog = Backlog()
        slot_transfer = SlotTransfer(database, schema, self._claimed, self._columns)
        self.ends = Settlements(database, schema, worker)
        self.lines = Waitlist(database, schema, self._take_held, slot_transfer, limited)

    # -- claim ------------------------------------------------------------------------------------

    def claim(self, entries: Sequence[Entry]) -> list[DelayTask]:
        """Those of the entries that are due, unchanged, and nobody else's. Rows that lapsed are left out."""
        if not entries:
            return []
        return self._claim(
            *self._claim_queries.named([(entry.id, entry.version) for entry in entries])
        )

    def claim_alone(self, id: int, version: int) -> DelayTask | None:
        """One row, whether it lapsed before or not: a row that kills its worker harms no neighbour."""
        rows = self._claim(*self._claim_queries.named([(id, version)], ANY_LAPSES))
        return rows[0] if rows else None

    def claim_due(self, queue: str, priorities: Sequence[int], limit: int) -> list[DelayTask]:
        """The oldest due rows of the highest priority: the slow path, which needs no message."""
        claimed: list[DelayTask] = []
        for priority in sorted(priorities, reverse=True):
            claimed += self._claim_level(queue, priority, limit - len(claimed))
            if len(claimed) >= limit:
                break
        return claimed

    def _claim_level(self, queue: str, priority: int, limit: int) -> list[DelayTask]:
        def claim(since: datetime | None, most: int) -> list[DelayTask]:
            return self._claim(*self._claim_queries.due(queue, priority, since, most))

        if self.lines.limited():  # which holds some of what it finds
            return claim(None, limit)
        since = self._backlog.since(queue, priority)
        claimed = claim(since, limit)
        if since is not None and len(claimed) < limit:
            claimed = [*claim(None, limit - len(claimed)), *claimed]
        self._backlog.reach(queue, priority, claimed, len(claimed) >= limit)
        return claimed

    def claim_abandoned(
        self, queue: str, priorities: Sequence[int] = range(MAX_PRIORITY + 1)
    ) -> DelayTask | None:
        """The due row that lapsed least and is oldest, of the highest priority. Each priority is asked for by itself:
        else the index would be walked through all rows that wait in the queue, however far in the future."""
        for priority in sorted(priorities, reverse=True):
            rows = self._claim(*self._claim_queries.lapsed(queue, priority))
            if rows:
                return rows[0]
        return None

    def _claim(self, pick: ClaimQuery, parameters: dict[str, Any]) -> list[DelayTask]:
        if self.lines.limited():
            return self._tasks(
                self._db.run(lambda: self._claim_in_two(pick.candidates, parameters))
            )
        if self._db.can.update_returning:
            return self._tasks(self._db.alone(lambda c: pick.take(c, parameters).rows))
        return self._tasks(
            self._db.run(lambda: self._claim_locked(pick.take, parameters)), is_claimed=False
        )

    def _claim_locked(self, pick: Prepared, parameters: dict[str, Any]) -> Sequence[Any]:
        """The rows as they were before: nobody else could change them, so they need not be read again."""
        with self._db.begin() as connection:
            rows = pick(connection, parameters).rows
            if rows:
                self._mark(connection, [row[0] for row in rows])
            return rows

    def _claim_in_two(self, pick: Prepared, parameters: dict[str, Any]) -> Sequence[Any]:
        with self._db.begin() as connection:
            candidates = [Candidate(*row) for row in pick(connection, parameters).rows]
            return self._take(connection, self.lines.let_in(connection, candidates))

    def _take(self, on: Any, ids: Sequence[int]) -> Sequence[Any]:
        """Rows that this transaction has locked."""
        if not ids:
            return []
        if self._db.can.update_returning:
            return self._taking(on, list_of(self._db, sorted(ids))).rows
        self._mark(on, ids)
        return list(on.execute(select(*self._columns).where(self._t.c.id.in_(ids))).all())

    def _mark(self, on: Any, ids: Sequence[int]) -> None:
        on.execute(update(self._t).where(self._t.c.id.in_(ids)).values(self._claimed))

    def _take_held(self, on: Any, pairs: Sequence[tuple[int, int]]) -> list[DelayTask]:
        """Those of these ids and versions that wait in line; what somebody has locked is passed over."""
        pick, parameters = self._claim_queries.named(pairs, ANY_LAPSES, Status.HELD)
        if self._db.can.update_returning:
            return self._tasks(pick.take(on, parameters).rows)
        return self._tasks(self._take(on, [row[0] for row in pick.candidates(on, parameters).rows]))

    def _tasks(self, rows: Iterable[Any], is_claimed: bool = True) -> list[DelayTask]:
        tasks = [task_of(row, self._schema) for row in rows]
        if not is_claimed:
            for task in tasks:
                task.status, task.version = MOVES["claim"].target, following(task.version)
                task.attempts = min(task.attempts + 1, MOST)
        return sorted(tasks, key=lambda task: (-task.priority, task.expected_time, task.id))

    def misses(self, ids: Iterable[int]) -> list[Miss]:
        t, wanted = self._t, list(ids)
        if not wanted:
            return []
        query = select(t.c.id, t.c.version, t.c.status, t.c.expected_time, t.c.lapses).where(
            t.c.id.in_(wanted)
        )
        rows = self._db.alone(lambda c: c.execute(query).all())
        return [Miss(row[0], row[1], Status.of(row[2]), to_us(row[3]), row[4]) for row in rows]

    # -- settle -----------------------------------------------------------------------------------

    def settle(self, settlements: Sequence[Settlement]) -> set[int]:
        """The ids whose end was accepted; the others were no longer ours."""
        return self.ends.settle(settlements)

    def complete(self, task: DelayTask, result: str | None, on: Executor) -> bool:
        """The end of a task that runs, as a part of its processor's own transaction; False if it was taken from it."""
        return self.ends.complete(task, result, on)

    def hand_over(
        self, settlements: Sequence[Settlement], queue: str, tag: str
    ) -> tuple[set[int], Sequence[DelayTask]]:
        """Settles them, and their places go to the next ones in line. That is one step: as many run as before, whoever
        counts them meanwhile, so nobody needs to count here."""

        def work() -> tuple[set[int], Sequence[DelayTask]]:
            with self._db.begin() as connection:
                accepted = self.ends.settle_together(connection, settlements)
                return accepted, self.lines.next(connection, queue, tag, len(accepted))

        return self._db.run(work)
