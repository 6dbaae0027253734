"""Whether the package of recurring schedules is needed: every sweep asks, and most find none."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import exists, func, select

from delaytasks.storage.database import Database
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now_plus, is_past


class DueSchedules:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._r = schema.recurring

    def exist(self, within_s: float) -> bool:
        """Return whether a schedule needs tasks that are due within `within_s` seconds."""
        next_at = self._r.c.next_at
        # The bound of NULLs helps MySQL, whose index begins with them.
        due = exists().where(is_past(next_at, db_now_plus(within_s)), next_at.is_not(None))
        return self._db.autocommitted(lambda c: bool(c.execute(select(due)).scalar()))

    def first_at(self) -> datetime | None:
        """Return the first occurrence that has no task yet; None if no schedule goes on."""
        first = select(func.min(self._r.c.next_at))
        found: datetime | None = self._db.autocommitted(lambda c: c.execute(first).scalar())
        return found

    def has_declared(self) -> bool:
        """Return whether code has declared a schedule that is stored here."""
        declared = exists().where(self._r.c.is_declared)
        return self._db.autocommitted(lambda c: bool(c.execute(select(declared)).scalar()))
