"""A caller with its own engine and session on the database of the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, select, update
from sqlalchemy.orm import Session

from delaytasks import DelayTask, DelayTasks, Status
from delaytasks.storage.store import Store
from tests.conformance.store_rows import status_columns
from tests.recording import RecordingTimer, delays_on, record


class SessionCaller:
    """A caller with its own engine and session on the same database."""

    def __init__(self, url: str, store: Store) -> None:
        self.delays: DelayTasks = delays_on(url, table_prefix="s_")
        self.timer: RecordingTimer = record(self.delays)
        self.engine = own_engine(url)
        self._store = store

    def session(self) -> Session:
        return Session(self.engine)

    def schedule(self, session: Any, delay: float = 5, **options: Any) -> DelayTask:
        return self.delays.schedule_delay("mail", {"n": 1}, delay, session=session, **options)

    def seen(self) -> set[int]:
        """Return the ids that other transactions see."""
        with self._store.database.auto.connect() as connection:
            return set(connection.execute(select(self._store.schema.tasks.c.id)).scalars())

    def keys(self) -> int:
        with self._store.database.auto.connect() as connection:
            return connection.execute(
                select(func.count()).select_from(self._store.schema.keys)
            ).scalar_one()

    def set_status(self, task: DelayTask, status: Status) -> None:
        t = self._store.schema.tasks
        with self._store.database.begin() as connection:
            connection.execute(update(t).where(t.c.id == task.id).values(status_columns(status)))

    @contextmanager
    def joined(self) -> Iterator[tuple[Connection, Session]]:
        """Yield a session that joins an outer transaction."""
        with self.engine.connect() as connection:
            outer = connection.begin()
            yield connection, Session(connection, join_transaction_mode="create_savepoint")
            if outer.is_active:
                outer.rollback()


def own_engine(url: str, **options: Any) -> Engine:
    engine = create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        # SQLAlchemy's documentation recommends this for savepoints with SQLite.
        event.listen(
            engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None)
        )
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine
