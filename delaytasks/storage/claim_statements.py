"""Claims rows in one statement, or in two where the database has no `UPDATE ... RETURNING`.

The docstring of `delaytasks.storage.claim_queries` shows the statements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from sqlalchemy import Column, select, update

from delaytasks.core.states import MOVES, following
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.row_lists import by_id, list_of
from delaytasks.storage.rows import MAX_INTEGER, task_of
from delaytasks.storage.schema import Schema

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

    def claim(self, on: Any, parameters: Mapping[str, Any]) -> list[DelayTask]:
        """Claim the rows in the transaction of the connection `on`."""
        return [task_of(row, self.schema) for row in self.statement(on, parameters).rows]

    def claim_and_commit(self, parameters: Mapping[str, Any]) -> list[DelayTask]:
        """Claim the rows in a transaction of its own."""
        claim = partial(self.committing_statement, values=parameters)
        return [task_of(row, self.schema) for row in self.database.autocommitted(claim).rows]

    def claim_locked(self, on: Any, ids: list[int]) -> list[DelayTask]:
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

    def claim(self, on: Any, parameters: Mapping[str, Any]) -> list[DelayTask]:
        """Claim the rows in the transaction of the connection `on`."""
        return self._claimed_tasks(self._lock_and_update(on, parameters))

    def claim_and_commit(self, parameters: Mapping[str, Any]) -> list[DelayTask]:
        """Claim the rows in a transaction of its own."""
        rows = self.database.transaction(lambda c: self._lock_and_update(c, parameters))
        return self._claimed_tasks(rows)

    def _lock_and_update(self, on: Any, parameters: Mapping[str, Any]) -> Sequence[Any]:
        rows = self.lock(on, parameters).rows
        if rows:
            self._update(on, [row[0] for row in rows])
        return rows

    def claim_locked(self, on: Any, ids: list[int]) -> list[DelayTask]:
        """Claim these rows, which the transaction of `on` has locked. They may be held rows."""
        self._update(on, ids)
        found = select(*self.whole).where(self.schema.tasks.c.id.in_(ids))
        return [task_of(row, self.schema) for row in on.execute(found)]

    def _update(self, on: Any, ids: Sequence[int]) -> None:
        t = self.schema.tasks
        claim = update(t).where(t.c.id.in_(ids)).values(self.claimed)
        check_row_count(on.execute(by_id(claim, t)).rowcount, len(ids), ROWS_TO_CLAIM)

    def _claimed_tasks(self, rows: Sequence[Any]) -> list[DelayTask]:
        """Return the tasks with the changes that the UPDATE made to these rows."""
        tasks = [task_of(row, self.schema) for row in rows]
        for task in tasks:
            task.status, task.version = MOVES["claim"].target, following(task.version)
            task.attempts = min(task.attempts + 1, MAX_INTEGER)
        return tasks


ClaimQuery: TypeAlias = OneStatementClaim | TwoStatementClaim
