"""A client that checks the side effects of refused calls, and invalid values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timezone
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from delaytasks import Status
from delaytasks.core import errors as e
from delaytasks.core.task import DelayTask
from delaytasks.storage.store import Store
from tests.conformance.store_rows import status_columns
from tests.recording import delays_on, record

UTC = timezone.utc
SECRET = "s3cr3t-canary"
SQL = "x'; DROP TABLE s_yb_delay_task_message; -- %s %(a)s :id \\ \" ?"


class RefusingClient:
    """A `DelayTasks` on empty tables that checks the side effects of refused calls."""

    def __init__(self, url: str, store: Store, **changes: Any) -> None:
        self.delays = delays_on(url, table_prefix="s_", **changes)
        self.timer = record(self.delays)
        self._store = store

    def traces(self) -> tuple[int, ...]:
        """Return the number of rows of each table and the number of messages sent."""
        tables = self._store.schema.metadata.sorted_tables
        counts = [select(func.count()).select_from(table).scalar_subquery() for table in tables]
        with self._store.database.auto.connect() as connection:
            rows = connection.execute(select(*counts)).one()
        return (*rows, len(self.timer.armed))

    @contextlib.contextmanager
    def refuses(self, error: type[e.DelayTaskError], *words: str) -> Iterator[None]:
        before = self.traces()
        with pytest.raises(error) as caught:
            yield
        assert type(caught.value) is error
        for word in words:
            assert word in str(caught.value)
        assert self.traces() == before, "something was half done"

    def put(
        self, status: Status = Status.NOT_COMPLETE, delay: float = 60, **options: Any
    ) -> DelayTask:
        task = self.delays.schedule_delay("mail", {"n": 1}, delay, **options)
        t = self._store.schema.tasks
        with self._store.database.begin() as connection:
            connection.execute(update(t).where(t.c.id == task.id).values(status_columns(status)))
        return task

    def insert(self, **values: Any) -> int:
        """Insert a row as another program would, and return its id."""
        t = self._store.schema.tasks
        with self._store.database.begin() as connection:
            made = connection.execute(
                insert(t).values(**{"tag": "mail", "message_body": "{}", **values})
            )
            key = made.inserted_primary_key
            assert key is not None
            return int(key[0])


class Unsayable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


UNSTORABLE = ["a\x00b", "\x00", "\ud800", "x\udfff", "\udc00\ud800"]
BAD_NAMES = [
    "",
    " ",
    "\t",
    "a\nb",
    "a\r\nb",
    "\x1b[31mred",
    "a\x7f",
    "\u202e",
    "\u2028",
    None,
    5,
    b"mail",
    ["mail"],
]
