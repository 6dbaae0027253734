"""Gathers the facts that decide why a task has not run (`core/why.py`)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import and_, func, select

from delaytasks.core.clock import Clock
from delaytasks.core.encryption import names_of
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.why import Facts, WorkerFacts
from delaytasks.storage.queue_levels import has_status
from delaytasks.storage.stats import Stats
from delaytasks.storage.store import Store


class FactReader:
    """Reads one database. A worker that has been silent for `silent_s` seconds counts as dead."""

    def __init__(self, store: Store, settings: Settings, silent_s: float) -> None:
        self._silent_s = silent_s
        self._store = store
        self._db, self._schema = store.database, store.schema
        self._settings = settings

    def of(self, task: DelayTask) -> Facts:
        """Return the facts that `why` needs about the task. Each is read from an index."""
        settings = self._settings
        now, offset_s = self._now()
        policies = self._store.policies.of(task.tag, task.queue)
        limited = any(policy.has_limits for policy in policies)
        swept = [s.at for s in Stats(self._db, self._schema).sweeps(settings.sweep_partitions)]
        last = min((at for at in swept if at is not None), default=None)
        return Facts(
            task,
            now,
            offset_s,
            self.workers(now),
            policies,
            is_in_waitlist=task.status is Status.HELD and self._is_in_waitlist(task),
            running=self._running_tasks(task.tag) if limited else 0,
            running_of_key=self._running_tasks(task.tag, task.concurrency_key)
            if limited and task.concurrency_key
            else 0,
            swept_s=None if last is None else (now - last).total_seconds(),
            grace_s=settings.grace_s,
            self_sweep_s=settings.self_sweep_s,
            keys=names_of(settings.encryption_keys),
        )

    def workers(self, now: datetime | None = None) -> list[WorkerFacts]:
        """Return the workers in the registry."""
        at = self._now()[0] if now is None else now
        found = []
        for row in self._store.workers.all():
            age_s = max((at - row["seen_at"]).total_seconds(), 0.0)
            is_alive = abs((at - row["seen_at"]).total_seconds()) <= self._silent_s
            found.append(WorkerFacts(row["name"], is_alive, age_s, row["queues"], row["tags"]))
        return found

    def _now(self) -> tuple[datetime, float]:
        """Return the time of the database, and how far the clock of this machine is ahead of it."""
        clock = Clock(lambda _: self._store.tasks.now())
        now = clock.certain_now()
        return now, clock.offset_s

    def _is_in_waitlist(self, task: DelayTask) -> bool:
        waitlist = self._schema.waitlists
        entry = and_(
            waitlist.c.queue == task.queue,
            waitlist.c.tag == task.tag,
            waitlist.c.concurrency_key == (task.concurrency_key or ""),
            waitlist.c.place == -task.priority,
            waitlist.c.due == task.expected_time,
            waitlist.c.task_id == task.id,
        )
        query = select(waitlist.c.task_id).where(entry).limit(1)
        return bool(self._db.rows(query))

    def _running_tasks(self, tag: str, key: str | None = None) -> int:
        t = self._schema.tasks
        query = select(func.count()).where(has_status(t, Status.RUNNING), t.c.tag == tag)
        if key is not None:
            query = query.where(t.c.concurrency_key == key)
        return self._db.alone(lambda c: int(c.execute(query).scalar_one()))
