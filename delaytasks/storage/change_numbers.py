"""Numbers that count the changes which workers look for once a second, in one small table."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ScalarSelect, select, update

from delaytasks.storage.database import Database
from delaytasks.storage.inserts import Insert
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.schema import Schema

#: The rows of the table: changes of policies, and requests to cancel running tasks.
POLICY_CHANGES, CANCEL_REQUESTS = 1, 2


class ChangeNumbers:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._t = schema.policy_changes
        self._insert = Insert(database, self._t, ("id", "number"))

    def of(self, row: int) -> ScalarSelect[int]:
        """Return the query of a number; it yields NULL if nothing has been counted."""
        return select(self._t.c.number).where(self._t.c.id == row).scalar_subquery()

    def next(self, on: Any, row: int) -> int:
        """Count one change, and return its number. The row stays locked until the commit."""
        mine = self._t.c.id == row
        counting = update(self._t).where(mine).values(number=self._t.c.number + 1)
        if not on.execute(counting).rowcount:
            self._insert(on, {"id": row, "number": 0})
            check_row_count(on.execute(counting).rowcount, 1, "the number of changes")
        number: int = on.execute(select(self._t.c.number).where(mine)).scalar_one()
        return number
