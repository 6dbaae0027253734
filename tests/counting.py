"""Count the rows of a store."""

from __future__ import annotations

from sqlalchemy import func, select

from delaytasks.core.states import Status
from delaytasks.storage.store import Store


def counted(store: Store) -> dict[Status, int]:
    """Return the number of rows of each status, by counting all rows."""
    t = store.schema.tasks.c
    query = select(t.status, func.count()).group_by(t.status)
    found = dict(store.database.autocommitted(lambda c: [tuple(row) for row in c.execute(query)]))
    return {status: found.get(int(status), 0) for status in Status}
