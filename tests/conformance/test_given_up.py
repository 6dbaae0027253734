"""Rows that failed because their workers died under them are found, on each database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import insert

from delaytasks.core.states import Status
from delaytasks.store.store import Store
from delaytasks.store.types import db_now


def _add(store: Store, **values: Any) -> None:
    row = {"tag": "t", "message_body": "{}", "expected_time": db_now(), "update_time": db_now(), **values}
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(**row))


def test_only_rows_that_lapsed_for_the_last_time_were_given_up(store: Store) -> None:
    since = store.tasks.now() - timedelta(seconds=1)
    running = {"status": int(Status.RUNNING), "worker": "w/1", "attempts": 1}
    _add(store, id=1, **running, lapses=2)
    _add(store, id=2, **running, lapses=0)
    _add(store, id=3, status=int(Status.FAILED), lapses=0, attempts=1)
    assert store.leases.release(["w/1"], 3) == 2
    [task] = store.leases.given_up(since)
    assert (task.id, task.status, task.lapses) == (1, Status.FAILED, 3)
    assert "3 times in a row" in (task.error or "")
    assert task.update_time is not None
    assert store.leases.given_up(task.update_time + timedelta(seconds=1)) == []
