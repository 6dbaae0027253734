"""Creates the tasks of recurring schedules, one row for each occurrence.

The sweep makes the tasks that are due soon (`create`). What defines, changes or resumes a schedule
makes those of the next `recurring_lead_s` itself (`make_tasks`): the next sweep may come when the
first of them have passed.

One transaction writes the tasks of some schedules and advances the schedules, so others find either
both or neither. It locks the schedules and changes them only at the version that it has read. The
key of a task contains the name and the occurrence, so that an occurrence cannot have two live tasks
even if an operator sets `next_at` back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, true, update

from delaytasks.db.database import Database
from delaytasks.db.producer import SLACK_S
from delaytasks.db.schema import BODY, Schema, check_row_count, instant_text, json_rows, listed
from delaytasks.db.statements import BulkInsert, Insert, insert_if_absent, write_nothing
from delaytasks.events import Events
from delaytasks.model.body import dump_json
from delaytasks.model.errors import TaskNotFoundError
from delaytasks.model.inputs import share_of
from delaytasks.model.moves import LIVE
from delaytasks.model.task import CallerConnection, DelayedTask, Entry, is_encrypted
from delaytasks.recurring.definition import FIELDS, ONE_SECOND, RecurringSchedule

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

# -- Which occurrences of a schedule need a task now. Nothing is read or written here -------------


#: An occurrence that passed longer ago was missed. A sweep that is a little late misses none.
MISSED_AFTER = timedelta(seconds=60)
#: The most tasks that one visit of the sweep makes for a schedule: with `missed="all"` those of the
#: last occurrences that were missed.
MOST_PER_VISIT = 1000
#: The last occurrences that have passed are searched in a window that begins with this length and
#: grows by this factor.
FIRST_WINDOW, WINDOW_GROWTH = timedelta(hours=1), 8


class Visit(NamedTuple):
    """The work of one visit of a schedule."""

    schedule: RecurringSchedule
    #: The occurrences that get a task.
    times: Sequence[datetime]
    #: The first occurrence that the next visit looks at; None after the last one.
    next_at: datetime | None
    #: Whether occurrences were missed and get no task.
    has_missed: bool = False
    #: Whether an occurrence gets no task because the task before it has not ended.
    has_overlapped: bool = False
    #: The occurrences again, with their tasks.
    tasks: Sequence[tuple[datetime, DelayedTask]] = ()


def plan(schedule: RecurringSchedule, now: datetime, until: datetime, is_last_live: bool) -> Visit:
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
    times: list[datetime] = []
    has_missed = False
    if next_at <= now:
        times, has_missed = _passed(schedule, next_at, now)
        next_at = schedule.parsed().after(now)
    if schedule.overlap == "skip" and is_last_live:
        # The next occurrence gets its task when the task before it has ended. If that has not
        # happened when the occurrence has passed, the occurrence is skipped.
        return Visit(schedule, [], next_at, has_missed, has_overlapped=bool(times))
    most = 1 if schedule.overlap == "skip" else MOST_PER_VISIT
    while next_at is not None and next_at <= until and len(times) < most:
        times.append(next_at)
        next_at = schedule.parsed().after(next_at)
    return Visit(schedule, times, next_at, has_missed)


def _passed(
    schedule: RecurringSchedule, since: datetime, now: datetime
) -> tuple[list[datetime], bool]:
    """Return the passed occurrences that get a task, and whether others get none."""
    gets_all = schedule.missed == "all" and schedule.overlap == "allow"
    most = MOST_PER_VISIT if gets_all else 1
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


# -- The SQL of recurring schedules ---------------------------------------------------------------


T = TypeVar("T")
_COLUMN_OF = {"body_json": "message_body", "headers_json": "headers", "meta_json": "meta"}
#: The columns in the order of the fields of `RecurringSchedule`.
SCHEDULE_COLUMNS = [_COLUMN_OF.get(field, field) for field in FIELDS]
_BODY_AT = FIELDS.index("body_json")
#: The values of each row of `advance`.
_ADVANCED = ("name", "version", "next_at", "last_at", "last_task_id")


class RecurringTable:
    """The recurring schedules, and the tasks that are made of them."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._schema = schema
        self._r = r = schema.recurring
        self._columns = [r.c[name] for name in SCHEDULE_COLUMNS]
        self._insert = Insert(database, r, SCHEDULE_COLUMNS)
        self._insert_tasks = BulkInsert(database, schema)
        k, t = schema.keys, schema.tasks
        new = json_rows(database, ("tag", "task_key", "id"))
        self._insert_keys = insert_if_absent(database, k, k.c.task_id).from_select(
            ["tag", "task_key", "task_id"],
            # Without a condition, SQLite would read ON CONFLICT as that of a join.
            select(new.c.tag, new.c.task_key, new.c.id).where(true()),
        )
        has_key = listed(database, k.c.task_key, "task_keys")
        self._owners = select(k.c.tag, k.c.task_key, k.c.task_id).where(has_key)
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
                write_nothing(connection, self._r)
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
        row = self.values(replace(known, **changes))
        changed = {_COLUMN_OF.get(field, field) for field in changes}
        if "tag" in changes:  # an encrypted body is bound to it
            changed.add("message_body")
        statement = update(self._r).where(self._is(known))
        values = {name: row[name] for name in changed}
        result = on.execute(statement.values(**values, version=self._r.c.version + 1))
        check_row_count(result.rowcount, 1, f"the recurring schedule {known.name!r}")
        return self.lock(on, known.name)

    def delete(self, on: Any, known: RecurringSchedule) -> None:
        result = on.execute(delete(self._r).where(self._is(known)))
        check_row_count(result.rowcount, 1, f"the recurring schedule {known.name!r}")

    def _is(self, known: RecurringSchedule) -> ColumnElement[bool]:
        return and_(self._r.c.name == known.name, self._r.c.version == known.version)

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

        A schedule that a caller's transaction has locked is left out, and the others do not wait.
        """
        r = self._r
        query = select(*self._columns).where(r.c.next_at <= until)
        if after is not None:
            same = and_(r.c.next_at == after.next_at, r.c.name > after.name)
            query = query.where(
                r.c.next_at >= after.next_at, or_(r.c.next_at > after.next_at, same)
            )
        query = query.order_by(r.c.next_at, r.c.name).limit(limit)
        query = query.with_for_update(skip_locked=True)
        return [self._schedule_of(row) for row in on.execute(query).all()]

    def advance(self, on: Any, visits: Sequence[Visit]) -> None:
        """Store what the visits change in schedules that this transaction has locked."""
        rows = []
        for visit in visits:
            schedule = visit.schedule
            last_at, last = visit.tasks[-1] if visit.tasks else (None, None)
            if last is not None or visit.next_at != schedule.next_at:
                row = {
                    "name": schedule.name,
                    "version": schedule.version,
                    "next_at": instant_text(self._db, visit.next_at),
                    "last_at": instant_text(self._db, last_at),
                    "last_task_id": None if last is None else last.id,
                }
                rows.append(row)
        if rows:
            values = {"rows": dump_json(rows), "names": sorted(str(row["name"]) for row in rows)}
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
        ids = {task.id for task in tasks}
        rows = [{"tag": task.tag, "task_key": task.key, "id": task.id} for task in tasks]
        if rows:
            on.execute(self._insert_keys, {"rows": dump_json(rows)})
            keys = sorted(str(task.key) for task in tasks)
            ids &= {row.task_id for row in on.execute(self._owners, {"task_keys": keys})}
        return ids

    def write(self, on: Any, tasks: Sequence[DelayedTask]) -> None:
        """Insert tasks that have their keys already."""
        if tasks:
            self._insert_tasks(on, tasks)

    # -- rows -------------------------------------------------------------------------------------

    def _schedule_of(self, row: Any) -> RecurringSchedule:
        values, cipher = list(row), self._schema.cipher
        if cipher is not None:
            values[_BODY_AT] = cipher.read(values[_BODY_AT], BODY, row.id, row.tag)
        return RecurringSchedule(*values)

    def values(self, schedule: RecurringSchedule) -> dict[str, Any]:
        """Return the row of a schedule by column."""
        values = {_COLUMN_OF.get(field, field): getattr(schedule, field) for field in FIELDS}
        if (cipher := self._schema.cipher) is not None:
            text = cipher.seal(schedule.body_json, BODY, schedule.id, schedule.tag)
            values["message_body"] = text
        return values


# -- Make the tasks -------------------------------------------------------------------------------


#: Schedules in one transaction, and the tasks after which it takes no further schedule.
BATCH_SCHEDULES, BATCH_TASKS = 2000, 5000
#: When a schedule is due, the tasks of this additional time are made too. A visit for many tasks
#: costs little more than a visit for one.
AHEAD = timedelta(seconds=30)


def create(runtime: Runtime) -> None:
    """Make the tasks of all schedules that are due soon."""
    last: RecurringSchedule | None = None
    while True:
        work = partial(_create_batch, runtime, runtime.clock.certain_now(), last)
        visits, last = runtime.recurring_table.transaction(work)
        report(runtime.events, visits)
        # Arm the tasks that the sweep may have passed. The next sweeps arm all later ones.
        made = (task for visit in visits for _, task in visit.tasks)
        runtime.arm_near(map(Entry.of, made), SLACK_S)
        if last is None:
            return


def _create_batch(
    runtime: Runtime, now: datetime, after: RecurringSchedule | None, on: Any
) -> tuple[list[Visit], RecurringSchedule | None]:
    """Return the visits, and the last schedule that was read; None after the last batch."""
    until = now + timedelta(seconds=runtime.settings.recurring_lead_s) + AHEAD
    found = runtime.recurring_table.due(on, until, after, BATCH_SCHEDULES)
    visits, visited = make_tasks(runtime, on, found, now, until)
    last = None if visited == len(found) < BATCH_SCHEDULES else found[visited - 1]
    return visits, last


def make_tasks(
    runtime: Runtime,
    on: Any,
    schedules: Sequence[RecurringSchedule],
    now: datetime,
    until: datetime,
) -> tuple[list[Visit], int]:
    """Write the tasks of locked schedules up to `until`, and advance the schedules.

    Return the visits, and how many schedules were looked at: after an outage, each may have many
    missed occurrences, and the others come in the next batch.
    """
    table = runtime.recurring_table
    alone = [each.last_task_id for each in schedules if each.overlap == "skip"]
    live = table.live(on, [id for id in alone if id])
    visits: list[Visit] = []
    visited = tasks = 0
    for each in schedules:
        if tasks >= BATCH_TASKS:
            break
        visit = _visit(runtime, each, now, until, each.last_task_id in live)
        visited += 1
        if visit is not None:
            visits.append(visit)
            tasks += len(visit.tasks)
    free = table.take_keys(on, [task for visit in visits for _, task in visit.tasks])
    # An occurrence that has a live task gets no second one.
    visits = [
        visit._replace(tasks=[each for each in visit.tasks if each[1].id in free])
        for visit in visits
    ]
    table.write(on, [task for visit in visits for _, task in visit.tasks])
    table.advance(on, visits)
    return visits, visited


def _visit(
    runtime: Runtime,
    schedule: RecurringSchedule,
    now: datetime,
    until: datetime,
    is_last_live: bool,
) -> Visit | None:
    """Plan the work for a schedule. A schedule that cannot be read stops no other one."""
    try:
        if is_encrypted(schedule.body_json):
            _ = schedule.body  # raises the error that no key of this process decrypts it
        planned = plan(schedule, now, until, is_last_live)
    except Exception as error:
        runtime.events.emit("recurring.failed", schedule=schedule.name, error=error)
        return None
    tasks = []
    for at in planned.times:
        # With jitter the task is due later, at a time that every process computes alike.
        due = at + timedelta(seconds=share_of(schedule.key_of(at)) * schedule.jitter_s)
        tasks.append((at, new_task(schedule, at, due, runtime.new_id(), now)))
    return planned._replace(tasks=tasks)


def report(events: Events, visits: Sequence[Visit]) -> None:
    """Emit the events of visits that are committed."""
    created = sum(len(visit.tasks) for visit in visits)
    if created:
        events.emit("recurring.created", count=created)
    for visit in visits:
        name, at = visit.schedule.name, str(visit.schedule.next_at)
        if visit.has_missed:
            events.emit("recurring.missed", schedule=name, since=at, policy=visit.schedule.missed)
        if visit.has_overlapped:
            events.emit("recurring.overlapped", schedule=name, at=at)


def new_task(
    schedule: RecurringSchedule, at: datetime, due: datetime, id: int, now: datetime
) -> DelayedTask:
    """Return a new task of an occurrence."""
    return DelayedTask(
        id=id,
        tag=schedule.tag,
        body_json=schedule.body_json,
        expected_time=due,
        queue=schedule.queue,
        priority=schedule.priority,
        key=schedule.key_of(at),
        delay_s=max(math.ceil((due - now).total_seconds()), 0),
        headers_json=schedule.headers_json,
        meta_json=schedule.meta_json,
        limit_key=schedule.limit_key,
        create_time=now,
    )
