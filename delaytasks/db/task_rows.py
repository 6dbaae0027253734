"""The rows of single tasks: insert, read, cancel, reschedule, touch and rerun."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, bindparam, case, exc, select, update

from delaytasks.db.database import Database
from delaytasks.db.driver_errors import TRIES, is_duplicate
from delaytasks.db.inserts import BulkInsert, Insert
from delaytasks.db.leases import ASKED, CancelRequests
from delaytasks.db.row_lists import by_id, check_row_count, listed
from delaytasks.db.rows import NEW_COLUMNS, columns, task_of, values_of
from delaytasks.db.schema import Schema
from delaytasks.db.searching import (
    after_cursor,
    conditions,
    first_page,
    limited_search,
    make_cursor,
)
from delaytasks.db.settlements import Attempts
from delaytasks.db.task_keys import KeyOwners, Moves, TaskKeys
from delaytasks.db.types import UTCDateTime, db_now, unindexed
from delaytasks.model.celery_calls import CELERY_PREFIX
from delaytasks.model.errors import DuplicateTaskError, TaskNotFoundError, TaskStateError
from delaytasks.model.filters import Filter, batches
from delaytasks.model.moves import LIVE, MOVES, Status
from delaytasks.model.task import Attempt, CallerConnection, DelayedTask, OnConflict, Page
from delaytasks.model.text import shown

T = TypeVar("T")
#: How often a row is looked at that is given back while it is asked to stop.
CANCEL_TRIES = 5


class Tasks:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._schema = schema
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self._columns = columns(schema)
        self._insert = Insert(database, t, NEW_COLUMNS)
        self._insert_bulk = BulkInsert(database, schema)
        self._moves = Moves(schema, self._keys)
        self._get = self._moves.get
        self.cancel_requests = CancelRequests(database, schema)
        self._key_owners = KeyOwners(database, schema, self._keys, self._moves)

    # -- schedule ---------------------------------------------------------------------------------

    def insert(self, task: DelayedTask, on: CallerConnection | None = None) -> bool:
        """Insert one row; return False if a row with this id exists."""
        values = values_of(task, self._schema)
        if on is not None:
            return self._insert(on, values)
        insert = partial(self._insert, values=values)
        return self._db.repeat(insert, self._db.connect, unknown_id=task.id)

    def insert_many(self, tasks: Sequence[DelayedTask], on: CallerConnection | None = None) -> bool:
        """Insert all rows together. Returns False, and inserts no row, if one of the ids exists."""

        def work(connection: Any) -> bool:
            try:
                with self._savepoint(on):
                    self._insert_bulk(connection, tasks)
            except exc.IntegrityError as error:
                if not is_duplicate(error):
                    raise
                if on is None:
                    connection.rollback()
                return False
            return True

        return self._db.transaction(work, on, tasks[0].id)

    def insert_keyed(
        self, task: DelayedTask, on_conflict: OnConflict, on: CallerConnection | None = None
    ) -> tuple[DelayedTask, bool]:
        """Return the task that owns the key afterwards, and whether it was written now."""

        def work(connection: Any) -> tuple[DelayedTask, bool]:
            with self._savepoint(on):  # an id that exists must not leave its key behind
                owner, is_new = self._key_owners.take(connection, task, on_conflict)
                if owner is task and not self._insert(connection, values_of(task, self._schema)):
                    raise DuplicateTaskError(f"there is a task with id {task.id} already", task.id)
                return owner, is_new

        if on is not None:
            return work(on)
        return self._db.repeat(work, self._db.begin, unknown_id=task.id)

    # -- look up ----------------------------------------------------------------------------------

    def get(self, id: int, on: CallerConnection | None = None) -> DelayedTask | None:
        row = self._db.autocommitted(lambda c: c.execute(self._get, {"task_id": id}).first(), on)
        return None if row is None else task_of(row, self._schema)

    def read(self, id: int, on: CallerConnection | None = None) -> DelayedTask:
        """Return the task, or raise `TaskNotFoundError`."""
        found = self.get(id, on)
        if found is None:
            raise TaskNotFoundError(f"there is no task {id}", id)
        return found

    def id_of_key(self, tag: str, key: str, on: CallerConnection | None = None) -> int | None:
        found = self._db.autocommitted(lambda c: self._keys.id_of(c, tag, key), on)
        if on is None or not self._db.can.reads_as_of_start:
            return found
        # Another task may have taken the key after the caller's transaction began. A caller that
        # cancels the key's task must neither miss it nor reach the previous owner.
        current = self.id_of_key(tag, key)
        if found is None:
            return current
        if current is None or current == found:
            return found
        # Either another transaction has passed the key on, or the caller's own, which only its
        # connection sees. A locking read on that connection sees both.
        return self._keys.id_of(on, tag, key, is_locked=True)

    def attempts(self, id: int, on: CallerConnection | None = None) -> list[Attempt]:
        return self._db.autocommitted(lambda c: self._attempts.of(c, id), on)

    def find(
        self,
        where: Filter,
        limit: int,
        cursor: str | None = None,
        on: CallerConnection | None = None,
        newest_first: bool = False,
        time_limit_s: float | None = None,
    ) -> Page:
        """Return a page of tasks in the order of their due times.

        Raise `SearchTimeoutError` after `time_limit_s` seconds. On a caller's connection, no limit
        applies.
        """
        t = self._t
        query = select(*self._columns).where(*conditions(t, where, self._db.can))
        if where.ids is not None:
            query = by_id(query, t)
        if cursor is not None:
            query = after_cursor(query, t, cursor, newest_first)

        def read(connection: Any) -> list[Any]:
            return first_page(connection, query, t, where, limit + 1, newest_first)

        if time_limit_s is None or on is not None:
            rows = self._db.autocommitted(read, on)
        else:
            rows = limited_search(self._db, read, time_limit_s)
        tasks = [task_of(row, self._schema) for row in rows[:limit]]
        return Page(tasks, make_cursor(tasks[-1]) if len(rows) > limit else None)

    def now(self, insists: bool = False) -> datetime:
        """Return the database's time. Unless the caller insists, an error is not tried again."""
        return self._db.now(TRIES if insists else 1)

    # -- move -------------------------------------------------------------------------------------

    def cancel(
        self,
        id: int,
        version: int | None = None,
        on: CallerConnection | None = None,
        running: bool = False,
    ) -> DelayedTask | None:
        """Return the task as it was left, or None if it was cancelled already.

        With `running`, a running task is asked to stop, and returned as RUNNING.
        """
        tried: list[DelayedTask] = []

        def work(connection: Any) -> DelayedTask | None:
            if tried:  # an earlier try of this call, whose answer was lost
                left = self.get(id, connection)
                if left is not None and (left.status, left.version) == (
                    tried[-1].status,
                    tried[-1].version,
                ):
                    return left
            for number in range(CANCEL_TRIES):
                try:
                    task = self._moves.take(connection, "cancel", id, version)
                    break
                except TaskStateError as error:
                    is_running = error.status is Status.RUNNING
                    if not (running and is_running) or number == CANCEL_TRIES - 1:
                        raise
                found = self.read(id, connection)
                if self.cancel_requests.make(connection, found):
                    return replace(found, cancel_request=ASKED)
                # The run has ended between these statements, and the row may wait again.
            if task.status is Status.CANCELLED:
                return None
            tried.append(self._moves.make(connection, "cancel", task, {}))
            self._keys.release(connection, task)
            return tried[-1]

        return self._db.transaction(work, on, id)

    def reschedule(
        self, id: int, due: datetime, version: int | None = None, on: CallerConnection | None = None
    ) -> DelayedTask:
        def work(connection: Any) -> DelayedTask:
            task = self._moves.take(connection, "reschedule", id, version)
            return self._moves.make(connection, "reschedule", task, {"expected_time": due})

        return self._db.transaction(work, on, id)

    def rerun(
        self, id: int, due: datetime, version: int | None = None, on: CallerConnection | None = None
    ) -> DelayedTask:
        """Let a finished task wait again, with its key."""

        def work(connection: Any) -> DelayedTask:
            task = self._moves.take(connection, "rerun", id, version)
            if task.key is not None:
                try:
                    with self._savepoint(on):
                        self._key_owners.take(connection, task, "reject")
                except DuplicateTaskError as error:
                    fact = f"task {error.id} has the key {task.key!r} of task {id} now"
                    raise DuplicateTaskError(f"rerun: {fact}", error.id) from None
            values = {"expected_time": due, "runs": 0, "lapses": 0}
            return self._moves.make(connection, "rerun", task, values)

        return self._db.transaction(work, on, id)

    # -- connections ------------------------------------------------------------------------------

    def together(self, work: Callable[[Any], T], unknown_id: int) -> T:
        """Run `work` in a transaction, which is tried again as a whole."""
        return self._db.transaction(work, unknown_id=unknown_id)

    def _savepoint(self, on: Any) -> AbstractContextManager[Any]:
        """Begin a savepoint on the caller's connection.

        Our own transactions, and connections that commit each statement, need no savepoint.
        """
        if on is None or (isinstance(on, Connection) and on._is_autocommit_isolation()):
            return nullcontext()
        if self._db.can.begins_late:
            # Without a statement that writes, the end of the savepoint would commit.
            self._keys.write_nothing(on)
        context: AbstractContextManager[Any] = on.begin_nested()
        return context


# -- Touch: moves a timeout to a later due time without a new version -----------------------------

# A message for the old time still arrives, and finds that the row is not due.


#: Rows in one transaction, so that their locks are short.
TOUCH_BATCH_ROWS = 2000


class Touches:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._keys = TaskKeys(database, schema)
        t, k, due = schema.tasks, schema.keys, bindparam("due", type_=UTCDateTime())
        waits = unindexed(t.c.status).in_([int(s) for s in MOVES["reschedule"].sources])
        later = case((t.c.expected_time < due, due), else_=t.c.expected_time)
        # The next try of a deferred task may be later than its new due time. MySQL assigns from
        # left to right, so due_time comes first and uses the old expected_time.
        later_due = case(
            (t.c.expected_time < due, None), (t.c.due_time < due, due), else_=t.c.due_time
        )
        touch = update(t).ordered_values(
            (t.c.due_time, later_due), (t.c.expected_time, later), (t.c.update_time, db_now())
        )
        of_key = select(k.c.task_id).where(
            k.c.tag == bindparam("of_tag"), k.c.task_key == bindparam("of_key")
        )
        named = listed(database, t.c.id, "ids")
        self._touch = touch.where(t.c.id == bindparam("task_id"), waits)
        self._touch_key = touch.where(t.c.id == of_key.scalar_subquery(), waits)
        self._touch_listed = touch.where(named)
        self._exists = select(t.c.id).where(t.c.id == bindparam("task_id"))
        waiting = select(t.c.id).where(named, waits).order_by(t.c.id)
        self._lock = waiting.with_for_update()
        self._lock_free = waiting.with_for_update(skip_locked=True)

    def touch(self, id: int, due: datetime, on: CallerConnection | None = None) -> bool:
        """Move one timeout. Returns False if the task no longer waits."""

        def work(connection: Any) -> bool:
            if connection.execute(self._touch, {"task_id": id, "due": due}).rowcount:
                return True
            if connection.execute(self._exists, {"task_id": id}).first() is None:
                raise TaskNotFoundError(f"there is no task {id}", id)
            return False

        return self._db.autocommitted(work, on)

    def touch_key(
        self, tag: str, key: str, due: datetime, on: CallerConnection | None = None
    ) -> bool:
        """Do the same by key, in one statement."""

        def work(connection: Any) -> bool:
            if connection.execute(
                self._touch_key, {"of_tag": tag, "of_key": key, "due": due}
            ).rowcount:
                return True
            if self._keys.id_of(connection, tag, key) is None:
                raise TaskNotFoundError(
                    f"no live task of tag {shown(tag)} has the key {shown(key)}"
                )
            return False

        return self._db.autocommitted(work, on)

    def touch_many(
        self, ids: Iterable[int], due: datetime, on: CallerConnection | None = None
    ) -> set[int]:
        """Move many timeouts. Returns the ids of the tasks that still wait."""
        wanted, touched = set(ids), set[int]()
        if on is not None:
            for batch in batches(sorted(wanted), TOUCH_BATCH_ROWS):
                touched.update(self._touch_batch(on, self._lock, batch, due))
            return touched
        # Rows that another transaction has locked come last, so that no other timeout waits for
        # them.
        for lock in (self._lock_free, self._lock):
            for batch in batches(sorted(wanted - touched), TOUCH_BATCH_ROWS):
                work = partial(self._touch_batch, lock=lock, ids=batch, due=due)
                touched.update(self._db.transaction(work))
        return touched

    def _touch_batch(self, on: Any, lock: Select[Any], ids: list[int], due: datetime) -> list[int]:
        """Touch in the order of ids, in which every transaction locks rows. Else two could
        deadlock."""
        waiting: list[int] = on.execute(lock, {"ids": ids}).scalars().all()
        if waiting:
            changed = on.execute(self._touch_listed, {"ids": waiting, "due": due}).rowcount
            check_row_count(changed, len(waiting), "tasks to touch")
        return waiting

    def ids_of_keys(
        self, tag: str, keys: Iterable[str], on: CallerConnection | None = None
    ) -> dict[str, int]:
        """Return the ids of live tasks by their keys."""
        wanted, found = set(keys), dict[str, int]()
        for batch in batches(sorted(wanted), TOUCH_BATCH_ROWS):
            found.update(
                self._db.autocommitted(partial(self._keys.ids_of, tag=tag, keys=batch), on)
            )
        if on is not None and self._db.can.reads_as_of_start:
            # Other tasks may have taken keys since the caller's transaction began (see
            # `Tasks.id_of_key`).
            for key, id in sorted(self.ids_of_keys(tag, wanted).items()):
                if found.setdefault(key, id) == id:
                    continue
                now = self._keys.id_of(on, tag, key, is_locked=True)
                if now is not None:
                    found[key] = now
        return found


# -- Rows that a worker shows when it is inspected ------------------------------------------------


class Inspection:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        names = "id tag queue priority runs worker update_time"
        self._select = select(*columns(schema, names.split()))

    def running(self, workers: Iterable[str], limit: int) -> Sequence[Any]:
        """Return up to `limit` rows that these processes have claimed, in the order of their
        claims."""
        t = self._t
        claimed = t.c.status == int(Status.RUNNING), t.c.worker.in_(list(workers))
        query = self._select.where(*claimed).order_by(t.c.update_time, t.c.id)
        return self._db.rows(query.limit(limit))

    def named(self, ids: Iterable[int]) -> dict[int, Any]:
        """Return the rows with these ids, by id."""
        query = self._select.where(self._t.c.id.in_(list(ids)))
        return {row.id: row for row in self._db.rows(query)}


# -- Rows that wait in place of Celery tasks ------------------------------------------------------


#: The keys of one statement.
MOST_KEYS = 500


class CeleryRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        t = schema.tasks
        self._db = database
        self._schema = schema
        rows = select(*columns(schema)).where(t.c.tag.like(f"{CELERY_PREFIX}%"))
        live = rows.where(t.c.status.in_([int(status) for status in LIVE]))
        has_key = listed(database, t.c.task_key, "task_keys")
        self._live_of_keys = live.where(has_key)
        self._live_of_ids = live.where(listed(database, t.c.id, "ids"))
        self._after = (
            live.where(t.c.id > bindparam("after")).order_by(t.c.id).limit(bindparam("limit"))
        )

    def live(self, keys: Sequence[str], on: CallerConnection | None = None) -> list[DelayedTask]:
        """Return the rows with these keys that wait or run."""
        found: list[DelayedTask] = []
        for some in batches(keys, MOST_KEYS):
            found += self._read(self._live_of_keys, {"task_keys": some}, on)
        return found

    def live_of_ids(self, ids: Sequence[int], on: CallerConnection | None) -> list[DelayedTask]:
        """Return the rows with these ids that wait or run."""
        found: list[DelayedTask] = []
        for some in batches(ids, MOST_KEYS):
            found += self._read(self._live_of_ids, {"ids": some}, on)
        return found

    def page(self, after: int, limit: int, on: CallerConnection | None = None) -> list[DelayedTask]:
        """Return up to `limit` rows that wait or run, in the order of their ids."""
        return self._read(self._after, {"after": after, "limit": limit}, on)

    def _read(
        self, query: Select[Any], parameters: dict[str, Any], on: CallerConnection | None
    ) -> list[DelayedTask]:
        rows = self._db.autocommitted(lambda c: c.execute(query, parameters).all(), on)
        return [task_of(row, self._schema) for row in rows]
