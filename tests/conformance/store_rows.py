"""Make, change and read the rows of the suites of the store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import insert, update

from delaytasks.core.interfaces import Entry
from delaytasks.core.states import Status
from delaytasks.core.task import DelayedTask
from delaytasks.storage.rows import values_of
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now_plus
from tests.conftest import settings_for

NASTY = (
    "tab\there, line\nbreak, return\rhere, back\\slash, \\N, \\., "
    "'quotes' \"double\", %s :name, 😀 ünï, <b>&"
)
_ids = itertools.count(1_000_000)
#: The columns that make a row one that a worker runs.
RUNNING: dict[str, Any] = {
    "status": int(Status.RUNNING),
    "lease_until": db_now_plus(60),
    "worker": "w",
}


def status_columns(status: Status) -> dict[str, Any]:
    return RUNNING if status is Status.RUNNING else {"status": int(status)}


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


def lapse_all(store: Store, tasks: Sequence[DelayedTask], max_lost_leases: int = 5) -> int:
    """End the leases of these tasks, and return how many rows the sweep released."""
    t = store.schema.tasks
    with store.database.begin() as connection:
        over = seconds(store.tasks.now(), -1)
        connection.execute(
            update(t).where(t.c.id.in_([made.id for made in tasks])).values(lease_until=over)
        )
    return store.sweeps.recover(max_lost_leases, 100).total


def second_store(store: Store, url: str) -> Store:
    """Return another store on the same tables."""
    prefix = store.schema.tasks.name.removesuffix("yb_delay_task_message")
    return Store(url, settings_for(url, table_prefix=prefix))


def keyed(store: Store, due_s: float = -10.0, **fields: Any) -> DelayedTask:
    made, is_new = store.tasks.insert_keyed(task(store, due_s, key="order-1", **fields), "reject")
    assert is_new
    return made


def counts_moves(store: Store) -> bool:
    """Return whether the version of a row is the number of its moves, also after a claim."""
    return not store.database.can.asynchronous_commit


def has_row_locks(store: Store) -> bool:
    return store.database.url.get_backend_name() != "sqlite"  # one writer at a time
