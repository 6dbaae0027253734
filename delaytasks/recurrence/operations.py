"""Stores, changes and finds recurring schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.core.actors import actor_of
from delaytasks.core.errors import (
    InvalidScheduleError,
    InvalidTimingError,
    RecurringNotFoundError,
    TaskStateError,
)
from delaytasks.core.inputs import check_page_limit, check_schedule_name, check_tag
from delaytasks.core.interfaces import CallerConnection
from delaytasks.core.new_task import NewTask
from delaytasks.core.task import DelayTask
from delaytasks.recurrence.creation import task_of
from delaytasks.recurrence.definition import Definition, started
from delaytasks.recurrence.queries import RecurringTable
from delaytasks.recurrence.schedule import (
    DEFINED,
    RecurringSchedule,
    has_same_start,
    is_same_definition,
)

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


class Change(NamedTuple):
    """A schedule after a change, and the tasks that were cancelled because of the change."""

    schedule: RecurringSchedule
    #: The kind of the change; empty if nothing was changed.
    action: str = ""
    cancelled: Sequence[DelayTask] = ()


#: Changes a locked schedule on a connection.
ChangeKnown = Callable[[Any, RecurringSchedule, datetime], Change]


class RecurringOperations:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._clock = runtime.clock
        self._producer = runtime.producer
        self._transaction_of = runtime.transactions.of
        self._events = runtime.events
        #: The time zone of cron expressions without one.
        self.default_tz = str(runtime.celery.conf.timezone or "UTC")
        self.table = RecurringTable(self._store.database, self._store.schema)

    # -- find -------------------------------------------------------------------------------------

    def get(self, name: str) -> RecurringSchedule:
        found = self.table.find(check_schedule_name(name))
        if found is None:
            raise RecurringNotFoundError(
                f"there is no recurring schedule {name!r}; `delaytasks recurring list` shows all"
            )
        return found

    def list(
        self, tag: str | None, prefix: str | None, after: str | None, limit: int
    ) -> list[RecurringSchedule]:
        check_page_limit(limit)
        return self.table.page(None if tag is None else check_tag(tag), prefix, after, limit)

    def next(self, name: str, count: int, after: datetime | None) -> Sequence[datetime]:
        return self.get(name).next(count, after or self._clock.certain_now())

    # -- define -----------------------------------------------------------------------------------

    def comparison(self, new: RecurringSchedule) -> str:
        """Return whether `put` would have "added" or "changed" the schedule, or "unchanged"."""
        known = self.table.find(new.name)
        if known is None:
            return "added"
        return "unchanged" if is_same_definition(known, new) else "changed"

    def checked(self, definition: Definition) -> RecurringSchedule:
        """Return the schedule of a definition; write nothing."""

        def build(new: NewTask) -> DelayTask:
            [task] = self._producer.build([new], "reject")
            return task

        return definition.checked(build, self.default_tz)

    def put(
        self,
        new: RecurringSchedule,
        session: Any = None,
        actor: str | None = None,
        is_declared: bool = False,
        is_paused: bool = False,
    ) -> RecurringSchedule:
        """Store a schedule. Another definition replaces the stored one; the same changes nothing.

        A pause remains; `is_paused` is for a schedule that is new. Tasks of the replaced definition
        that wait for later occurrences are cancelled.
        """
        table, who = self.table, actor_of(actor)

        def work(on: Any, now: datetime) -> Change:
            known = table.find(new.name, on, locks=True)
            if known is None:
                id = self._runtime.new_id()
                made = _first(replace(new, is_paused=is_paused), id, now, who, is_declared)
                if table.insert(on, made):
                    return Change(made, "added")
                known = table.lock(on, new.name)
            if known.is_declared and not is_declared:
                raise InvalidScheduleError(
                    f"the recurring schedule {known.name!r} is declared in code: change it there, "
                    "or choose another name"
                )
            if is_same_definition(known, new) and known.is_declared == is_declared:
                return Change(known)
            cancelled = self._cancel_waiting(on, known, now)
            changes = _changes(known, new, now) | {
                "is_declared": is_declared,
                "update_time": now,
                "updated_by": who,
            }
            if not known.is_paused:
                changes["next_at"] = _next_at(known, changes, now)
            return Change(table.update(on, known, changes), "changed", cancelled)

        return self._change(work, session, who)

    # -- change -----------------------------------------------------------------------------------

    def pause(self, name: str, session: Any, actor: str | None) -> RecurringSchedule:
        """Make no more tasks, and cancel the waiting tasks of later occurrences."""

        def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
            if known.is_paused:
                return Change(known)
            cancelled = self._cancel_waiting(on, known, now)
            changes = {"is_paused": True, "next_at": None}
            return Change(self.table.update(on, known, changes), "paused", cancelled)

        return self._change_known(name, work, session, actor)

    def resume(self, name: str, session: Any, actor: str | None) -> RecurringSchedule:
        """Continue with the next occurrence. Occurrences during the pause were not missed."""

        def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
            if not known.is_paused:
                return Change(known)
            changes = {"is_paused": False, "next_at": known.parsed().after(now)}
            return Change(self.table.update(on, known, changes), "resumed")

        return self._change_known(name, work, session, actor)

    def remove(self, name: str, session: Any, actor: str | None) -> RecurringSchedule:
        """Delete the schedule, and cancel the waiting tasks of later occurrences."""

        def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
            cancelled = self._cancel_waiting(on, known, now)
            self.table.delete(on, known)
            return Change(known, "removed", cancelled)

        return self._change_known(name, work, session, actor)

    def run(self, name: str, session: Any) -> DelayTask:
        """Make one task that is due now; the occurrences stay as they are.

        Without overlap, the next occurrence gets its task when this one has ended.
        """
        made: list[DelayTask] = []

        def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
            at = now.replace(microsecond=now.microsecond // 1000 * 1000)
            task = task_of(known, at, at, self._runtime.new_id(), now)
            made[:] = [task]  # a transaction may be tried again
            table, cancelled = self.table, list[DelayTask]()
            changes: dict[str, Any] = {"last_task_id": task.id}
            if known.overlap == "skip" and not known.is_paused:
                cancelled += self._cancel_waiting(on, known, now)
                changes["next_at"] = known.parsed().after(now)
            table.write(on, made)
            return Change(table.update(on, known, changes), "run", cancelled)

        self._change_known(name, work, session, None)
        self._events.emit("task.scheduled", id=made[0].id, tag=made[0].tag)
        self._producer.arm_after_commit(made, self._transaction_of(session))
        return made[0]

    # -- internals --------------------------------------------------------------------------------

    def _change_known(
        self,
        name: str,
        work: ChangeKnown,
        session: Any,
        actor: str | None,
    ) -> RecurringSchedule:
        check_schedule_name(name)

        def change(on: Any, now: datetime) -> Change:
            return work(on, self.table.lock(on, name), now)

        return self._change(change, session, actor_of(actor))

    def _change(
        self, work: Callable[[Any, datetime], Change], session: Any, who: str
    ) -> RecurringSchedule:
        """Run `work` in the caller's transaction, or in one of our own."""
        transaction, now = self._transaction_of(session), self._clock.certain_now()
        with transaction.guard() if transaction is not None else nullcontext() as on:
            change = self.table.transaction(lambda c: work(c, now), on)
        if change.action:
            name = change.schedule.name
            self._events.emit("recurring.changed", schedule=name, change=change.action, actor=who)
        for task in change.cancelled:
            self._events.emit("task.cancelled", id=task.id, tag=task.tag)
            self._producer.disarm_after_commit(task, transaction)
        return change.schedule

    def _cancel_waiting(
        self, on: CallerConnection, known: RecurringSchedule, now: datetime
    ) -> Sequence[DelayTask]:
        """Cancel the tasks that sweeps have made ahead and that wait for their due times."""
        if known.last_at is None:
            return []
        try:
            keys = [known.key_of(at) for at in known.between(now, known.last_at)]
        except InvalidTimingError:
            return []  # another program wrote the timing, and no sweep made tasks of it
        cancelled: list[DelayTask] = []
        for id in self.table.ids_of_keys(on, known.tag, keys):
            try:
                task = self._store.tasks.cancel(id, on=on)
            except TaskStateError:
                continue  # the task runs
            cancelled += [] if task is None else [task]
        return cancelled


def _first(
    new: RecurringSchedule, id: int, now: datetime, who: str, is_declared: bool
) -> RecurringSchedule:
    """Return a new schedule as it is stored."""
    made = replace(
        new,
        start_at=started(new, now),
        is_declared=is_declared,
        create_time=now,
        update_time=now,
        updated_by=who,
        id=id,
    )
    return made if made.is_paused else replace(made, next_at=made.parsed().after(now))


def _next_at(
    known: RecurringSchedule, changes: Mapping[str, Any], now: datetime
) -> datetime | None:
    """Return the first occurrence without a task after a change.

    An occurrence that has passed without a task stays missed if the times are the same, so that
    `missed` applies to it.
    """
    since = now
    if known.next_at is not None and changes.keys().isdisjoint({"timing", "tz", "start_at"}):
        since = min(now, known.next_at - timedelta(seconds=1))
    return replace(known, **changes).parsed().after(since)


def _changes(known: RecurringSchedule, new: RecurringSchedule, now: datetime) -> dict[str, Any]:
    """Return the fields in which a new definition differs from the stored one."""
    changes = {
        field: getattr(new, field)
        for field in DEFINED
        if getattr(known, field) != getattr(new, field)
    }
    if not has_same_start(known, new):
        changes["start_at"] = new.start_at
    elif "timing" in changes:
        changes["start_at"] = started(new, now)
    return changes
