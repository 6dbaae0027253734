"""Gathers the facts about a task, from database, broker and timer. `why.py` judges them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from delaytasks.broker.link import broker_error
from delaytasks.db.policy_rows import is_entry_of
from delaytasks.db.searching import has_status
from delaytasks.model.body import names_of
from delaytasks.model.clock import MAX_ID, Clock, first_id, from_us
from delaytasks.model.errors import StoreUnavailableError
from delaytasks.model.moves import Status
from delaytasks.model.task import ASKED, DelayedTask, id_of
from delaytasks.operate.single_tasks import find_id, name_of
from delaytasks.operate.state_queries import Stats
from delaytasks.operate.why import AuditFacts, Explanation, Facts, Reason, ScheduleFacts, why

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

#: A waitlist is counted up to this number.
MOST_WAITLIST_COUNTED = 10_000
#: The ids of a minute: a cancel and its log entry have the times of the clocks of two machines.
IDS_AROUND = first_id(from_us(60_000_000)) - first_id(from_us(0))
#: The key of a task that a recurring schedule has made: its name and the time of the occurrence.
_RECURRING_KEY = re.compile(r"(.+)@[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z")


class Explanations:
    """Explains why tasks have not run, or how they ended."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._db, self._schema = runtime.store.database, runtime.store.schema

    def of(self, task: object, tag: str | None = None, key: str | None = None) -> Explanation:
        """Explain a task that is named by its id, by an earlier read, or by its tag and key.

        The task is read again. An unavailable database is itself the explanation.

        Raises
        ------
        TaskNotFoundError
            If there is no such task, or it was purged.
        """
        name = name_of(task, tag, key)
        try:
            store = self._runtime.store
            found = store.tasks.read(find_id(store, name, None))
            facts = self.facts(found)
        except StoreUnavailableError as error:
            id = None if isinstance(name, tuple) else id_of(name)
            return Explanation(id, None, [_unreachable(error)])
        return Explanation(found.id, found, why(self._with_transport(facts)))

    def facts(self, task: DelayedTask) -> Facts:
        """Return what the tables say about the task.

        Each fact is read from an index, except for the operation that has cancelled the task.
        """
        store, settings = self._runtime.store, self._settings
        now, offset_s = self._now()
        policies = store.policies.read(("tag", task.tag), ("queue", task.queue))
        limited = any(policy.has_limits for policy in policies)
        swept = [s.at for s in Stats(self._db, self._schema).sweeps(settings.sweep_partitions)]
        last = min((at for at in swept if at is not None), default=None)
        is_in_waitlist = task.status is Status.HELD and self._is_in_waitlist(task)
        return Facts(
            task,
            now,
            offset_s,
            store.workers.registered(now, settings.silent_s),
            policies,
            is_in_waitlist=is_in_waitlist,
            waitlist_tasks=self._waitlist_tasks(task) if is_in_waitlist else 0,
            running=self._running_tasks(task.tag) if limited else 0,
            running_of_key=self._running_tasks(task.tag, task.limit_key)
            if limited and task.limit_key
            else 0,
            swept_s=None if last is None else (now - last).total_seconds(),
            grace_s=settings.grace_s,
            self_sweep_s=settings.self_sweep_s,
            namespace=settings.namespace,
            keys=names_of(settings.encryption_keys),
            schedule=self._schedule(task),
            cancelled_by=self._cancelled_by(task) if task.status is Status.CANCELLED else None,
        )

    def _with_transport(self, facts: Facts) -> Facts:
        """Ask broker and timer, if the task waits for them now."""
        runtime, settings, queue = self._runtime, self._settings, facts.task.queue
        horizon_s = settings.horizon_s
        is_due_soon = horizon_s is None or facts.wait_s <= horizon_s
        waits = facts.task.status is Status.NOT_COMPLETE and is_due_soon
        if not (waits and settings.uses_broker):
            return facts
        limit_s, redis_timer = settings.publish_limit_s, runtime.redis_timer
        timer_error = None
        if redis_timer is not None and redis_timer.counts([queue]) is None:
            timer_error = f"no answer within {limit_s:g} s"
        error = broker_error(runtime.celery, limit_s)
        return facts._replace(broker_error=error, timer_error=timer_error)

    def _now(self) -> tuple[datetime, float]:
        """Return the time of the database, and how far the clock of this machine is ahead of it."""
        clock = Clock(lambda _: self._runtime.store.tasks.now())
        now = clock.certain_now()
        return now, clock.offset_s

    def _is_in_waitlist(self, task: DelayedTask) -> bool:
        waitlist = self._schema.waitlists
        query = select(waitlist.c.task_id).where(is_entry_of(waitlist, task)).limit(1)
        return bool(self._db.rows(query))

    def _waitlist_tasks(self, task: DelayedTask) -> int:
        w = self._schema.waitlists.c
        mine = select(w.task_id).where(w.queue == task.queue, w.tag == task.tag)
        first = mine.limit(MOST_WAITLIST_COUNTED).subquery()
        query = select(func.count()).select_from(first)
        return self._db.autocommitted(lambda c: int(c.execute(query).scalar_one()))

    def _schedule(self, task: DelayedTask) -> ScheduleFacts | None:
        match = _RECURRING_KEY.fullmatch(task.key or "")
        if match is None:
            return None
        r = self._schema.recurring.c
        columns = r.name, r.timing, r.is_paused, r.next_at
        rows = self._db.rows(select(*columns).where(r.name == match[1], r.tag == task.tag))
        return ScheduleFacts(*rows[0]) if rows else None

    def _cancelled_by(self, task: DelayedTask) -> AuditFacts | None:
        """Return the log entry of the action that has cancelled the task."""
        if task.update_time is None:
            return None
        a = self._schema.audit.c
        query = select(a.id, a.actor).order_by(a.id.desc()).limit(1)
        if (task.cancel_request or ASKED) != ASKED:
            query = query.where(a.id == task.cancel_request)  # with other tasks
        else:
            # By a person in the console. The ids of the entries contain their times, so the primary
            # key leads to those of that time.
            near = min(first_id(task.update_time), MAX_ID - IDS_AROUND)
            query = query.where(a.id >= near - IDS_AROUND, a.id < near + IDS_AROUND)
            is_mine = a.filter.contains(f'"id":"{task.id}"', autoescape=True)
            query = query.where(a.action == "cancel_task", a.changed > 0, is_mine)
        rows = self._db.rows(query)
        return AuditFacts(*rows[0]) if rows else None

    def _running_tasks(self, tag: str, key: str | None = None) -> int:
        t = self._schema.tasks
        query = select(func.count()).where(has_status(t, Status.RUNNING), t.c.tag == tag)
        if key is not None:
            query = query.where(t.c.limit_key == key)
        return self._db.autocommitted(lambda c: int(c.execute(query).scalar_one()))


def _unreachable(error: StoreUnavailableError) -> Reason:
    return Reason(
        "unreachable",
        f"The database cannot be read, so the task waits at least until it can: {error}.",
        "Bring the database back; workers continue by themselves.",
        {"error": str(error)},
    )
