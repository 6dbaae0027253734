"""The SQL of recurring schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import and_, delete, func, insert, null, or_, select, true, update

from delaytasks.core.body import dump_json
from delaytasks.core.errors import RecurringNotFoundError
from delaytasks.core.interfaces import CallerConnection
from delaytasks.core.states import LIVE
from delaytasks.core.task import DelayTask
from delaytasks.recurrence.schedule import RecurringSchedule
from delaytasks.storage.database import Database
from delaytasks.storage.inserts import BulkInsert, Insert, skipping_insert
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.row_lists import instant_text, json_rows, listed
from delaytasks.storage.schema import BODY, Schema
from delaytasks.storage.task_keys import TaskKeys

T = TypeVar("T")
#: The columns in the order of the fields of `RecurringSchedule`.
SCHEDULE_COLUMNS = (
    "name tag message_body queue priority headers concurrency_key timing tz start_at jitter_s "
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
    """The schedules of one database, and the tasks that are made of them."""

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
            raise RecurringNotFoundError(f"there is no recurring schedule {name!r}")
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

    def take_keys(self, on: Any, tasks: Sequence[DelayTask]) -> set[int]:
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

    def _key_rows(self, on: Any, tasks: Sequence[DelayTask]) -> Sequence[Any]:
        keys = sorted(task.key for task in tasks if task.key is not None)
        rows: Sequence[Any] = on.execute(self._owners, {"task_keys": keys}).all()
        return rows

    def write(self, on: Any, tasks: Sequence[DelayTask]) -> None:
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
