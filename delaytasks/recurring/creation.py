"""Creates the tasks of recurring schedules in the sweep, one row for each occurrence."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import and_, delete, func, insert, null, or_, select, true, update

from delaytasks.db.database import Database
from delaytasks.db.inserts import BulkInsert, Insert, skipping_insert
from delaytasks.db.row_lists import check_row_count, instant_text, json_rows, listed
from delaytasks.db.schema import BODY, Schema
from delaytasks.db.task_keys import TaskKeys
from delaytasks.events import Events
from delaytasks.model.body import dump_json
from delaytasks.model.clock import Clock
from delaytasks.model.errors import TaskNotFoundError
from delaytasks.model.moves import LIVE
from delaytasks.model.task import CallerConnection, DelayedTask, Entry, Timer
from delaytasks.recurring.definition import RecurringSchedule, check_readable, task_options
from delaytasks.recurring.timing import ONE_SECOND
from delaytasks.settings import Settings

# -- Which occurrences of a schedule need a task now. Nothing is read or written here -------------


#: An occurrence that passed longer ago was missed. A sweep that is a little late misses none.
MISSED_AFTER = timedelta(seconds=60)
#: The most tasks that one visit of the sweep makes for a schedule.
MOST_PER_VISIT = 1000
#: The last occurrences that have passed are searched in a window that begins with this length and
#: grows by this factor.
FIRST_WINDOW, WINDOW_GROWTH = timedelta(hours=1), 8


class Plan(NamedTuple):
    """The result of planning one visit of a schedule."""

    #: The occurrences that get a task.
    times: Sequence[datetime]
    #: The first occurrence that the next visit looks at; None after the last one.
    next_at: datetime | None
    #: Whether occurrences were missed and get no task.
    has_missed: bool = False
    #: Whether an occurrence gets no task because the task before it has not ended.
    has_overlapped: bool = False


def plan(schedule: RecurringSchedule, now: datetime, until: datetime, is_last_live: bool) -> Plan:
    """Plan a visit of a schedule that has `next_at`, for occurrences up to `until`.

    Parameters
    ----------
    schedule
        The schedule.
    now, until
        The time, and the end of the time for which tasks are made ahead.
    is_last_live
        Whether the schedule's last task waits or runs.
    """
    next_at = schedule.next_at
    assert next_at is not None, "the sweep reads schedules with a next occurrence only"
    passed: list[datetime] = []
    has_missed = False
    if next_at <= now:
        passed, has_missed = _passed(schedule, next_at, now)
        next_at = schedule.parsed().after(now)
    if schedule.overlap == "skip":
        return _alone(schedule, passed, next_at, until, is_last_live, has_missed)
    times = [*passed]
    while next_at is not None and next_at <= until and len(times) < MOST_PER_VISIT:
        times.append(next_at)
        next_at = schedule.parsed().after(next_at)
    return Plan(times, next_at, has_missed)


def due_of(schedule: RecurringSchedule, at: datetime) -> datetime:
    """Return the due time of an occurrence, which every process computes alike."""
    if not schedule.jitter_s:
        return at
    share = random.Random(schedule.key_of(at)).random()
    return at + timedelta(seconds=share * schedule.jitter_s)


def _passed(
    schedule: RecurringSchedule, since: datetime, now: datetime
) -> tuple[list[datetime], bool]:
    """Return the passed occurrences that get a task, and whether others get none."""
    most = schedule.most_missed if schedule.missed == "all" else 1
    last = _last_between(schedule, since, now, most + 1)
    chosen = last[-most:]
    if schedule.missed == "skip":
        chosen = [at for at in chosen if now - at <= MISSED_AFTER]
    return chosen, len(chosen) < len(last)


def _last_between(
    schedule: RecurringSchedule, since: datetime, now: datetime, most: int
) -> list[datetime]:
    """Return the last occurrences in [since, now], at most `most`.

    A schedule may have millions there after a long outage, so the search begins at their end.
    """
    window = FIRST_WINDOW
    while True:
        begin = max(since - ONE_SECOND, now - window)
        found = deque(schedule.between(begin, now), maxlen=most)
        if len(found) == most or begin < since:
            return [at for at in found if at >= since]
        window *= WINDOW_GROWTH


def _alone(
    schedule: RecurringSchedule,
    passed: Sequence[datetime],
    next_at: datetime | None,
    until: datetime,
    is_last_live: bool,
    has_missed: bool,
) -> Plan:
    """Plan for a schedule whose tasks must not overlap: at most one of them waits or runs.

    The next occurrence gets its task as soon as the task before it has ended. If that has not
    happened when the occurrence has passed, the occurrence is skipped.
    """
    if is_last_live:
        return Plan([], next_at, has_missed, has_overlapped=bool(passed))
    if passed:
        return Plan(passed[-1:], next_at, has_missed or len(passed) > 1)
    if next_at is None or next_at > until:
        return Plan([], next_at, has_missed)
    return Plan([next_at], schedule.parsed().after(next_at), has_missed)


# -- The SQL of recurring schedules ---------------------------------------------------------------


T = TypeVar("T")
#: The columns in the order of the fields of `RecurringSchedule`.
SCHEDULE_COLUMNS = (
    "name tag message_body queue priority headers limit_key timing tz start_at jitter_s "
    "missed most_missed overlap is_declared is_paused next_at last_at last_task_id version "
    "create_time update_time updated_by id"
).split()
#: The columns that the sweep does not read. An instant takes longer to read than any other value.
_UNREAD = ("last_at", "create_time", "update_time")
_FIELD_OF = {"message_body": "body_json", "headers": "headers_json"}
#: The values of each row of `advance`.
_ADVANCED = ("name", "version", "next_at", "last_at", "last_task_id")


class Advance(NamedTuple):
    """The new values of a schedule that a sweep has locked."""

    schedule: RecurringSchedule
    next_at: datetime | None
    #: The last occurrence that got a task, and this task's id; None if none got one.
    last_at: datetime | None
    last_task_id: int | None


class RecurringTable:
    """The recurring schedules, and the tasks that are made of them."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._schema = schema
        self._r = r = schema.recurring
        self._columns = [r.c[name] for name in SCHEDULE_COLUMNS]
        self._swept = [
            null().label(name) if name in _UNREAD else r.c[name] for name in SCHEDULE_COLUMNS
        ]
        self._insert = Insert(database, r, SCHEDULE_COLUMNS)
        self._keys = TaskKeys(database, schema)
        self._insert_tasks = BulkInsert(database, schema)
        keys, t = schema.keys, schema.tasks
        self._owners = select(keys.c.tag, keys.c.task_key, keys.c.task_id).where(
            listed(database, keys.c.task_key, "task_keys")
        )
        new = json_rows(database, ("tag", "task_key", "id"))
        rows = select(new.c.tag, new.c.task_key, new.c.id)
        skipping, names = skipping_insert(database), ["tag", "task_key", "task_id"]
        self._insert_keys = insert(keys).from_select(names, rows)
        if skipping is not None:
            # Without a condition, SQLite would read ON CONFLICT as that of a join.
            self._insert_keys = (
                skipping(keys)
                .from_select(names, rows.where(true()))
                .on_conflict_do_nothing()
                .execution_options(preserve_rowcount=True)
            )
        self._live = select(t.c.id).where(
            listed(database, t.c.id, "ids"), t.c.status.in_([int(status) for status in LIVE])
        )
        w = json_rows(database, _ADVANCED)
        self._advance = (
            update(r)
            # The list lets PostgreSQL use the index instead of reading all schedules.
            .where(
                listed(database, r.c.name, "names"),
                r.c.name == w.c.name,
                r.c.version == w.c.version,
            )
            .values(
                next_at=w.c.next_at,
                last_at=func.coalesce(w.c.last_at, r.c.last_at),
                last_task_id=func.coalesce(w.c.last_task_id, r.c.last_task_id),
                version=r.c.version + 1,
            )
        )

    def transaction(self, work: Callable[[Any], T], on: CallerConnection | None = None) -> T:
        """Run `work` in the caller's transaction, or in one of our own."""

        def begun(connection: Any) -> T:
            if on is None and self._db.can.begins_late:
                # The reads must belong to the transaction, which the first write begins.
                self._keys.write_nothing(connection)
            return work(connection)

        return self._db.transaction(begun, on)

    # -- one schedule -----------------------------------------------------------------------------

    def find(self, name: str, on: Any = None, locks: bool = False) -> RecurringSchedule | None:
        query = select(*self._columns).where(self._r.c.name == name)
        if locks:
            query = query.with_for_update()
        row = self._db.autocommitted(lambda c: c.execute(query).first(), on)
        return None if row is None else self._schedule_of(row)

    def lock(self, on: Any, name: str) -> RecurringSchedule:
        found = self.find(name, on, locks=True)
        if found is None:
            raise TaskNotFoundError(f"there is no recurring schedule {name!r}")
        return found

    def insert(self, on: Any, schedule: RecurringSchedule) -> bool:
        """Insert a schedule; return False if one of its name exists."""
        return self._insert(on, self.values(schedule))

    def update(
        self, on: Any, known: RecurringSchedule, changes: Mapping[str, Any]
    ) -> RecurringSchedule:
        """Change fields of a locked schedule, and return it as it is stored."""
        values = {_column(field): value for field, value in changes.items()}
        if changes.keys() & {"body_json", "tag"}:  # an encrypted body is bound to the tag
            body, tag = changes.get("body_json", known.body_json), changes.get("tag", known.tag)
            values["message_body"] = self._sealed(body, known.id, tag)
        r = self._r
        mine = and_(r.c.name == known.name, r.c.version == known.version)
        statement = update(r).where(mine).values(**values, version=r.c.version + 1)
        check_row_count(on.execute(statement).rowcount, 1, _named(known))
        return self.lock(on, known.name)

    def delete(self, on: Any, known: RecurringSchedule) -> None:
        r = self._r
        mine = and_(r.c.name == known.name, r.c.version == known.version)
        check_row_count(on.execute(delete(r).where(mine)).rowcount, 1, _named(known))

    # -- many schedules ---------------------------------------------------------------------------

    def page(
        self, tag: str | None, prefix: str | None, after: str | None, limit: int
    ) -> list[RecurringSchedule]:
        """Return schedules in the order of their names, beginning after a name."""
        r = self._r
        query = select(*self._columns).order_by(r.c.name).limit(limit)
        if tag is not None:
            query = query.where(r.c.tag == tag)
        if prefix is not None:
            query = query.where(func.substr(r.c.name, 1, len(prefix)) == prefix)
        if after is not None:
            query = query.where(r.c.name > after)
        return [self._schedule_of(row) for row in self._db.rows(query)]

    def declared(self) -> list[RecurringSchedule]:
        query = select(*self._columns).where(self._r.c.is_declared)
        return [self._schedule_of(row) for row in self._db.rows(query)]

    def due(
        self, on: Any, until: datetime, after: RecurringSchedule | None, limit: int
    ) -> list[RecurringSchedule]:
        """Lock and return the schedules with an occurrence up to `until`, the earliest first.

        Their `last_at`, `create_time` and `update_time` are None.
        """
        r = self._r
        query = select(*self._swept).where(r.c.next_at <= until)
        if after is not None:
            same = and_(r.c.next_at == after.next_at, r.c.name > after.name)
            query = query.where(
                r.c.next_at >= after.next_at, or_(r.c.next_at > after.next_at, same)
            )
        query = query.order_by(r.c.next_at, r.c.name).limit(limit).with_for_update()
        return [self._schedule_of(row) for row in on.execute(query).all()]

    def advance(self, on: Any, advances: Sequence[Advance]) -> None:
        rows = [
            {
                "name": each.schedule.name,
                "version": each.schedule.version,
                "next_at": self._text(each.next_at),
                "last_at": self._text(each.last_at),
                "last_task_id": each.last_task_id,
            }
            for each in advances
        ]
        if rows:
            names = sorted(each.schedule.name for each in advances)
            values = {"rows": dump_json(rows), "names": names}
            changed = on.execute(self._advance, values).rowcount
            check_row_count(changed, len(rows), "recurring schedules")

    # -- tasks ------------------------------------------------------------------------------------

    def live(self, on: Any, ids: Collection[int]) -> set[int]:
        """Return the ids of the tasks that wait or run."""
        if not ids:
            return set()
        return set(on.execute(self._live, {"ids": sorted(ids)}).scalars())

    def take_keys(self, on: Any, tasks: Sequence[DelayedTask]) -> set[int]:
        """Insert the keys of new tasks, and return the ids of the tasks whose keys were free."""
        if tasks and not self._db.can.insert_or_skip:
            taken = {(tag, key) for tag, key, _ in self._key_rows(on, tasks)}
            tasks = [task for task in tasks if (task.tag, task.key) not in taken]
        ids = {task.id for task in tasks}
        if not tasks:
            return ids
        rows = [{"tag": task.tag, "task_key": task.key, "id": task.id} for task in tasks]
        inserted = on.execute(self._insert_keys, {"rows": dump_json(rows)}).rowcount
        if inserted == len(tasks):
            return ids
        return ids & {id for _, _, id in self._key_rows(on, tasks)}

    def _key_rows(self, on: Any, tasks: Sequence[DelayedTask]) -> Sequence[Any]:
        keys = sorted(task.key for task in tasks if task.key is not None)
        rows: Sequence[Any] = on.execute(self._owners, {"task_keys": keys}).all()
        return rows

    def write(self, on: Any, tasks: Sequence[DelayedTask]) -> None:
        """Insert tasks that have their keys already."""
        if tasks:
            self._insert_tasks(on, tasks)

    def ids_of_keys(self, on: Any, tag: str, keys: Sequence[str]) -> list[int]:
        return sorted(self._keys.ids_of(on, tag, keys).values()) if keys else []

    # -- rows -------------------------------------------------------------------------------------

    def _schedule_of(self, row: Any) -> RecurringSchedule:
        values = list(row)
        values[2] = self._read(values[2], row.id, row.tag)
        return RecurringSchedule(*values)

    def values(self, schedule: RecurringSchedule) -> dict[str, Any]:
        """Return the row of a schedule by column."""
        values = {name: getattr(schedule, _FIELD_OF.get(name, name)) for name in SCHEDULE_COLUMNS}
        values["message_body"] = self._sealed(schedule.body_json, schedule.id, schedule.tag)
        return values

    def _read(self, text: str, id: int, tag: str) -> str:
        cipher = self._schema.cipher
        return text if cipher is None else cipher.read(text, BODY, id, tag)

    def _sealed(self, text: str, id: int, tag: str) -> str:
        cipher = self._schema.cipher
        return text if cipher is None else cipher.seal(text, BODY, id, tag)

    def _text(self, instant: datetime | None) -> str | None:
        return instant_text(self._db, instant)


def _column(field: str) -> str:
    return next((column for column, named in _FIELD_OF.items() if named == field), field)


def _named(schedule: RecurringSchedule) -> str:
    return f"the recurring schedule {schedule.name!r}"


#: Schedules in one transaction, and the tasks after which it takes no further schedule.
BATCH_SCHEDULES, BATCH_TASKS = 2000, 5000
#: When a schedule is due, the tasks of this additional time are made too. A visit for many tasks
#: costs little more than a visit for one.
AHEAD = timedelta(seconds=30)
#: Tasks are armed a little beyond the horizon, as far as the sweep before may have read.
SLACK_S = 1.0


class Visit(NamedTuple):
    """The work of a sweep for one schedule."""

    schedule: RecurringSchedule
    plan: Plan
    #: The occurrences that get a task, and these tasks.
    tasks: Sequence[tuple[datetime, DelayedTask]]

    @property
    def advance(self) -> Advance | None:
        """The new values of the schedule; None if nothing has changed."""
        last_at, last = self.tasks[-1] if self.tasks else (None, None)
        if last is None and self.plan.next_at == self.schedule.next_at:
            return None
        return Advance(self.schedule, self.plan.next_at, last_at, None if last is None else last.id)


class Creation:
    """Makes the tasks of recurring schedules.

    One transaction writes the tasks of a batch of schedules and advances the schedules. Another
    sweeper therefore finds either both or neither. The transaction locks the schedules and changes
    them only at the version that it has read. The key of a task contains the name and the
    occurrence, so that an occurrence cannot have two live tasks even if an operator sets `next_at`
    back.
    """

    def __init__(
        self,
        settings: Settings,
        table: RecurringTable,
        new_id: Callable[[], int],
        clock: Clock,
        timer: Timer,
        events: Events,
    ) -> None:
        self._table = table
        self._new_id = new_id
        self._clock = clock
        self._timer = timer
        self._events = events
        self._ahead = timedelta(seconds=settings.recurring_lead_s) + AHEAD
        self._horizon_s = math.inf if settings.horizon_s is None else settings.horizon_s

    def create(self, on_step: Callable[[], None]) -> None:
        """Make the tasks that are due soon. `on_step` is called after each batch."""
        last: RecurringSchedule | None = None
        while True:
            write = partial(self._write_batch, self._clock.certain_now(), last)
            visits, last = self._table.transaction(write)
            on_step()
            self._report(visits)
            self._arm([task for visit in visits for _, task in visit.tasks])
            if last is None:
                return

    def _write_batch(
        self, now: datetime, after: RecurringSchedule | None, on: Any
    ) -> tuple[Sequence[Visit], RecurringSchedule | None]:
        """Return the visits, and the last schedule that was read; None after the last batch."""
        found = self._table.due(on, now + self._ahead, after, BATCH_SCHEDULES)
        last = found[-1] if len(found) == BATCH_SCHEDULES else None
        alone = [each for each in found if each.overlap == "skip"]
        live = self._table.live(on, [each.last_task_id for each in alone if each.last_task_id])
        visits: list[Visit] = []
        tasks = 0
        for each in found:
            visit = self._visit(each, now, each.last_task_id in live)
            if visit is not None:
                visits.append(visit)
                tasks += len(visit.tasks)
            if tasks >= BATCH_TASKS and each is not found[-1]:
                last = each  # after an outage, each schedule may have many missed occurrences
                break
        visits = self._with_keys(on, visits)
        self._table.write(on, [task for visit in visits for _, task in visit.tasks])
        self._table.advance(on, [advance for visit in visits if (advance := visit.advance)])
        return visits, last

    def _visit(
        self, schedule: RecurringSchedule, now: datetime, is_last_live: bool
    ) -> Visit | None:
        """Plan the work for a schedule. A schedule that cannot be read stops no other one."""
        try:
            check_readable(schedule)
            planned = plan(schedule, now, now + self._ahead, is_last_live)
        except Exception as error:
            self._events.emit("recurring.failed", schedule=schedule.name, error=error)
            return None
        tasks = [
            (at, task_of(schedule, at, due_of(schedule, at), self._new_id(), now))
            for at in planned.times
        ]
        return Visit(schedule, planned, tasks)

    def _with_keys(self, on: Any, visits: list[Visit]) -> list[Visit]:
        """Take the keys of the tasks, and leave out the occurrences that have a live task."""
        tasks = [task for visit in visits for _, task in visit.tasks]
        free = self._table.take_keys(on, tasks)
        if len(free) == len(tasks):
            return visits
        return [
            visit._replace(tasks=[each for each in visit.tasks if each[1].id in free])
            for visit in visits
        ]

    def _report(self, visits: Sequence[Visit]) -> None:
        created = sum(len(visit.tasks) for visit in visits)
        if created:
            self._events.emit("recurring.created", count=created)
        for schedule, planned, _ in visits:
            if planned.has_missed:
                self._events.emit(
                    "recurring.missed",
                    schedule=schedule.name,
                    since=str(schedule.next_at),
                    policy=schedule.missed,
                )
            if planned.has_overlapped:
                self._events.emit(
                    "recurring.overlapped", schedule=schedule.name, at=str(schedule.next_at)
                )

    def _arm(self, tasks: Sequence[DelayedTask]) -> None:
        """Arm the tasks that the sweep may have passed. The next sweeps arm all later ones."""
        until_us = self._clock.now_us() + (self._horizon_s + SLACK_S) * 1e6
        near = [entry for entry in map(Entry.of, tasks) if entry.due_us <= until_us]
        if near:
            self._timer.arm(near)


def task_of(
    schedule: RecurringSchedule, at: datetime, due: datetime, id: int, now: datetime
) -> DelayedTask:
    """Return a new task of an occurrence, due then or, with jitter, later."""
    headers_json, meta_json = task_options(schedule)
    return DelayedTask(
        id=id,
        tag=schedule.tag,
        body_json=schedule.body_json,
        expected_time=due,
        queue=schedule.queue,
        priority=schedule.priority,
        key=schedule.key_of(at),
        delay_s=max(math.ceil((due - now).total_seconds()), 0),
        headers_json=headers_json,
        meta_json=meta_json,
        limit_key=schedule.limit_key,
        create_time=now,
    )
