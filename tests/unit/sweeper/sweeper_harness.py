"""Sweeps on an SQLite file, with a timer that records what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from sqlalchemy import insert, select, update

from delaytasks import DelayTask, Status
from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.storage.rows import values_of
from tests.conftest import open_store, settings_for
from tests.recording import RecordingTimer

_ids = count(1)


class SweeperHarness:
    """A table and its sweeper."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.settings = settings_for(url, **changes)
        self.store = open_store(url, **changes)
        self.clock = Clock(self.store.tasks.now)
        self.events, self.timer = Events(), RecordingTimer()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.events.subscribe(lambda name, fields: self.told.append((name, fields)))

    def sweeper(self, timer: Any = None) -> Sweeper:
        parts = (
            self.settings,
            self.store.sweeps,
            self.store.workers,
            self.clock,
            timer or self.timer,
            self.events,
        )
        return Sweeper(*parts)

    def row(self, in_s: float = 5, status: Status = Status.NOT_COMPLETE, **changes: Any) -> int:
        return self.rows([in_s], status, **changes)[0]

    def rows(
        self, in_s: Iterable[float], status: Status = Status.NOT_COMPLETE, **changes: Any
    ) -> list[int]:
        """Insert a row for each number of seconds, all in one transaction."""
        if status is Status.RUNNING:
            changes = {"worker": "w", "lease_until": self.clock.now() + timedelta(60), **changes}
        now = self.clock.now()
        tasks = [
            DelayTask(next(_ids), "mail", "{}", now + timedelta(seconds=s), status, create_time=now)
            for s in in_s
        ]
        with self.store.database.begin() as connection:
            connection.execute(
                insert(self.store.schema.tasks),
                [{**values_of(task, self.store.schema), **changes} for task in tasks],
            )
        return [task.id for task in tasks]

    def sweep(self, sweep_partition: int = 0, timer: Any = None) -> list[int]:
        """Sweep after the usual time, and return the ids that the sweep armed."""
        before = len(self.timer.armed)
        self.let_pass()
        assert self.sweeper(timer).sweep(sweep_partition)
        return [entry.id for entry in self.timer.armed[before:]]

    def let_pass(self) -> None:
        s = self.store.schema.sweeps
        with self.store.database.begin() as connection:
            connection.execute(update(s).values(swept_at=self.clock.now() - timedelta(seconds=60)))

    def armed_until(self, sweep_partition: int = 0) -> datetime:
        s = self.store.schema.sweeps
        with self.store.database.auto.connect() as connection:
            query = select(s.c.armed_until).where(s.c.sweep_partition == sweep_partition)
            found: datetime = connection.execute(query).scalar_one()
            return found

    def near_until(self, in_s: float) -> None:
        """Record that a sweep has armed the rows due within `in_s`."""
        s = self.store.schema.sweeps
        with self.store.database.begin() as connection:
            connection.execute(
                update(s).values(armed_until=self.clock.now() + timedelta(seconds=in_s))
            )

    def status(self, id: int) -> Status:
        found = self.store.tasks.get(id)
        assert found is not None
        return found.status

    def serve(self, name: str, *queues: str) -> None:
        self.store.workers.report(name, queues, "prefork", 2, 0)

    def silence(self, name: str) -> None:
        w = self.store.schema.workers
        with self.store.database.begin() as connection:
            long_ago = self.clock.now() - timedelta(seconds=60)
            connection.execute(update(w).where(w.c.name == name).values(seen_at=long_ago))

    def count(self, event: str) -> int:
        return self.events.counts[event]


Make = Callable[..., SweeperHarness]
