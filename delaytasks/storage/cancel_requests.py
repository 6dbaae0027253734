"""Requests to cancel running tasks. The version, which is the fence of the run, stays as it is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import select, update

from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.change_numbers import CANCEL_REQUESTS, ChangeNumbers
from delaytasks.storage.database import Database
from delaytasks.storage.queue_levels import has_status
from delaytasks.storage.schema import Schema

#: The value of the column `cancel_request` of a row that was asked to stop.
ASKED = 1


class CancelRequests:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._numbers = ChangeNumbers(database, schema)

    def make(self, on: Any, task: DelayTask) -> bool:
        """Ask the run of this version to stop. Return False if it has ended meanwhile."""
        t = self._t
        is_this_run = (
            t.c.id == task.id,
            t.c.version == task.version,
            has_status(t, Status.RUNNING),
        )
        asking = update(t).where(*is_this_run).values(cancel_request=ASKED)
        if not on.execute(asking).rowcount:
            return False
        self._numbers.next(on, CANCEL_REQUESTS)  # workers look for the request within a second
        return True

    def of(self, workers: Collection[str]) -> list[tuple[int, int]]:
        """Return id and version of the rows of these processes that were asked to stop."""
        t = self._t
        query = select(t.c.id, t.c.version).where(
            has_status(t, Status.RUNNING),
            t.c.worker.in_(list(workers)),
            t.c.cancel_request.is_not(None),
        )
        return [(row[0], row[1]) for row in self._db.rows(query)]
