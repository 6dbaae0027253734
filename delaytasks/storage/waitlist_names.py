"""Lists the waitlists of a queue, whether or not their tags still have limits."""

from __future__ import annotations

from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, func

from delaytasks.storage.database import Database
from delaytasks.storage.queue_levels import steps
from delaytasks.storage.schema import Schema

#: Waitlists of a queue that one call of `in_queue` returns: each of them costs a statement.
WAITLISTS_PER_CALL = 100


def is_entry_of(waitlist: Table, row: Any) -> ColumnElement[bool]:
    """The condition for the entries of a task, or of a row whose columns are `row`."""
    entry = waitlist.c
    return and_(
        entry.queue == row.queue,
        entry.tag == row.tag,
        entry.concurrency_key == func.coalesce(row.concurrency_key, ""),
        entry.place == -row.priority,
        entry.due == row.expected_time,
        entry.task_id == row.id,
    )


class WaitlistNames:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._entry = schema.waitlists
        #: The tag of each queue after which the next call of `in_queue` goes on.
        self._after: dict[str, str] = {}

    def in_queue(self, queue: str) -> set[tuple[str, str]]:
        """Return `WAITLISTS_PER_CALL` waitlists of a queue; the next call returns the next ones."""
        entry, after = self._entry, self._after.get(queue)
        here = entry.c.queue == queue
        later = here if after is None else and_(here, entry.c.tag > after)
        tags = self._db.autocommitted(
            lambda c: list(islice(steps(c, entry.c.tag, later), WAITLISTS_PER_CALL))
        )
        if len(tags) == WAITLISTS_PER_CALL:
            self._after[queue] = tags[-1]
        elif self._after.pop(queue, None) is not None and not tags:
            return self.in_queue(queue)  # the last call returned the last ones
        return {(queue, tag) for tag in tags}
