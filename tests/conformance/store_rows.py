"""Make, change and read the rows of the suites of the store."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import insert

from delaytasks.core.interfaces import Entry
from delaytasks.core.states import Status
from delaytasks.core.task import DelayedTask
from delaytasks.storage.rows import values_of
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now_plus

NASTY = (
    "tab\there, line\nbreak, return\rhere, back\\slash, \\N, \\., "
    "'quotes' \"double\", %s :name, 😀 ünï, <b>&"
)
_ids = itertools.count(1_000_000)


def task(store: Store, due_s: float = -10.0, **fields: Any) -> DelayedTask:
    """Return an unwritten task that is due `due_s` seconds from now."""
    now = store.tasks.now()
    values: dict[str, Any] = {
        "id": next(_ids),
        "tag": "mail",
        "body_json": "{}",
        "expected_time": seconds(now, due_s),
    }
    return DelayedTask(**{**values, "create_time": now, **fields})


def seconds(instant: datetime, more: float) -> datetime:
    return instant + timedelta(seconds=more)


def add(store: Store, due_s: float = -10.0, **fields: Any) -> DelayedTask:
    made = task(store, due_s, **fields)
    assert store.tasks.insert(made)
    return made


def put(store: Store, status: Status, **fields: Any) -> DelayedTask:
    """Insert a row directly with this status."""
    made = task(store, **fields)
    with store.database.begin() as connection:
        row = {
            **values_of(made, store.schema),
            "status": int(status),
            "runs": made.runs,
            "lapses": made.lapses,
        }
        if status is Status.RUNNING:
            row |= {
                "lease_until": made.lease_until or db_now_plus(60),
                "worker": made.worker or "w",
            }
        connection.execute(insert(store.schema.tasks).values(row))
    return replace(made, status=status)


def read(store: Store, id: int) -> DelayedTask:
    found = store.tasks.get(id)
    assert found is not None
    return found


def entry(made: DelayedTask) -> Entry:
    return Entry.of(made)
