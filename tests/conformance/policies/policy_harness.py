"""Tasks on a database, with sweeps and runs that the test starts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import update

from delaytasks import DelayTask, DelayTasks
from delaytasks.core.interfaces import Entry
from delaytasks.execution.runner import Report
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import RecordingTimer, delays_on, record, record_sweeps

PREFIX = "pol_"
HOUR = 3600.0


class PolicyHarness:
    """Tasks on a database, with sweeps and runs that the test starts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ran: list[Any] = []
        self.others: list[DelayTasks] = []
        self.delays = self.process()
        self.store: Store = runtime_of(self.delays).store
        self.timer: RecordingTimer = runtime_of(self.delays).sweeper._timer  # type: ignore[assignment]

    def process(self) -> DelayTasks:
        """Open another process on the same tables."""
        made = delays_on(self.url, table_prefix=PREFIX)
        timer = record(made)
        runtime = runtime_of(made)
        record_sweeps(runtime, timer)
        holding: Any = runtime.sweeper._pauses
        holding._budget_s = 60  # the pass completes even if the machine stalls for seconds
        for tag in ("mail", "sms"):
            made.processor(tag)(self.ran.append)
        self.others.append(made)
        return made

    def add(self, tag: str = "mail", in_s: float = HOUR, **options: Any) -> DelayTask:
        task = self.delays.schedule_delay(tag, options.pop("body", {}), max(in_s, 0), **options)
        if in_s <= 0:
            t = self.store.schema.tasks
            due = task.expected_time + timedelta(seconds=in_s - 1)
            with self.store.database.begin() as connection:
                connection.execute(update(t).where(t.c.id == task.id).values(expected_time=due))
        return self.delays.get(task)

    def sweep(self, process: DelayTasks | None = None) -> None:
        s = self.store.schema.sweeps
        with self.store.database.begin() as connection:
            connection.execute(
                update(s).values(swept_at=self.store.tasks.now() - timedelta(seconds=60))
            )
        assert runtime_of(process or self.delays).sweeper.sweep()

    def sweep_until(self, is_so: Callable[[], object]) -> None:
        for _ in range(100):
            if is_so():
                return
            self.sweep()
        raise AssertionError("100 sweeps were not enough")

    def run(self, *tasks: DelayTask, process: DelayTasks | None = None) -> Report:
        return (
            (process or self.delays)
            .runner()
            .run([Entry(task.id, task.version, 0) for task in tasks])
        )

    def statuses(self, *tasks: DelayTask) -> list[str]:
        return [self.delays.get(task).status.name for task in tasks]

    def count(self, name: str) -> int:
        return self.delays.events.counts[name]

    def close(self) -> None:
        for delays in self.others:
            delays.close()

    def held(self) -> list[int]:
        return [task.id for task in self.delays.find(status="HELD", limit=1000)]
