"""Rows as producers and operators see them: schedule, look up, cancel, reschedule, retry, touch."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, bindparam, case, delete, exc, false, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from delaytasks.core.clock import from_us, to_us
from delaytasks.core.errors import (
    CancelTooLateError,
    DuplicateTaskError,
    InvalidQueryError,
    InvalidStatusError,
    StaleVersionError,
    StoreUnavailableError,
    TaskNotFoundError,
)
from delaytasks.core.ports import Executor, OnConflict
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import DelayTask, Page
from delaytasks.core.text import shown
from delaytasks.store.database import TRIES, Database
from delaytasks.store.rows import columns, task_of, values_of
from delaytasks.store.schema import Schema
from delaytasks.store.types import db_now

T = TypeVar("T")


class Tasks:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._keys = k = schema.keys
        self._columns = columns(schema)
        dialect = database.url.get_backend_name()
        skip: Any = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}.get(dialect)
        self._insert = skip(t).on_conflict_do_nothing() if skip else insert(t)
        self._insert_key = skip(k).on_conflict_do_nothing() if skip else insert(k)
        self._get = select(*self._columns).where(t.c.id == bindparam("task_id"))
        self._of_key = select(k.c.task_id).where(k.c.tag == bindparam("tag"), k.c.task_key == bindparam("task_key"))

    # -- schedule ---------------------------------------------------------------------------------

    def insert(self, task: DelayTask, on: Executor | None = None) -> bool:
        """True if the row is new; False if a row with this id exists."""
        if on is not None:
            return self._insert_or_skip(on, self._insert, values_of(task))
        return self._db.run(lambda: self._insert_alone(task), unknown_id=task.id)

    def _insert_alone(self, task: DelayTask) -> bool:
        with self._db.auto.connect() as connection:
            return self._insert_or_skip(connection, self._insert, values_of(task))

    def _insert_or_skip(self, on: Any, statement: Any, values: dict[str, Any]) -> bool:
        if self._db.can.insert_or_skip:
            return bool(on.execute(statement, values).rowcount)
        try:
            on.execute(statement, values)
        except exc.IntegrityError as error:
            if not _is_duplicate(error):
                raise
            return False
        return True

    def insert_many(self, tasks: Sequence[DelayTask], on: Executor | None = None) -> bool:
        """All rows in one go; False (and no row) if one of the ids exists."""

        def work(connection: Any) -> bool:
            try:
                with self._savepoint(connection):
                    self._insert_bulk(connection, tasks)
            except exc.IntegrityError as error:
                if not _is_duplicate(error):
                    raise
                return False
            return True

        return self._in_transaction(work, on, tasks[0].id)

    def _insert_bulk(self, connection: Any, tasks: Sequence[DelayTask]) -> None:
        if not (self._db.can.copy and isinstance(connection, Connection) and connection.dialect.driver == "psycopg2"):
            connection.execute(insert(self._t), [values_of(task) for task in tasks])
            return
        lines = io.StringIO()
        for task in tasks:
            lines.write(_copy_line(values_of(task).values()))
        lines.seek(0)
        target = connection.dialect.identifier_preparer.format_table(self._t)
        names = ", ".join(values_of(tasks[0]))
        driver: Any = connection.dialect.dbapi
        cursor: Any = connection.connection.cursor()
        try:
            cursor.copy_expert(f"COPY {target} ({names}) FROM STDIN", lines)
        except driver.Error as error:
            raise exc.DBAPIError.instance("COPY", None, error, driver.Error, dialect=connection.dialect) from error
        finally:
            cursor.close()

    def insert_keyed(
        self, task: DelayTask, on_conflict: OnConflict, on: Executor | None = None
    ) -> tuple[DelayTask, bool]:
        """The task that has the key afterwards, and whether it was written now."""
        def work(connection: Any) -> tuple[DelayTask, bool]:
            if on is None:
                return self._take_key(connection, task, on_conflict)
            with self._savepoint(connection):  # an id that exists must not leave its key behind
                return self._take_key(connection, task, on_conflict)

        return self._in_transaction(work, on, unknown_id=task.id)

    def _take_key(self, on: Any, task: DelayTask, on_conflict: OnConflict) -> tuple[DelayTask, bool]:
        for attempt in range(TRIES):
            # In MySQL a failed INSERT would leave a lock on the key, so a look comes first there.
            is_free = self._db.can.insert_or_skip or self._holder(on, task, is_locked=attempt > 0) is None
            if is_free and self._insert_or_skip(on, self._insert_key, _key_row(task)):
                return self._insert_own(on, task)
            # The key's row first, then the task's: settling and cancelling go the same way, or they would deadlock.
            holder_id = self._holder(on, task, is_locked=True)
            if holder_id is not None:
                break  # else its task has just ended
        else:
            raise StoreUnavailableError(f"key {task.key!r} of tag {task.tag!r} changed hands {TRIES} times; try again")
        holder = self._locked(on, holder_id)
        if holder is None or holder.is_finished:
            return self._take_over_key(on, task)  # what had the key was purged, or finished by another program
        if holder.id == task.id:
            return holder, False
        if on_conflict == "reject":
            raise DuplicateTaskError(
                f"task {holder.id} ({holder.status.name}, due {holder.expected_time.isoformat()}) has the key "
                f"{task.key!r} of tag {task.tag!r}; on_conflict='keep' or 'replace' says what else to do",
                holder.id,
            )
        if on_conflict == "keep":
            return holder, False
        if holder.status not in MOVES["replace"].sources:
            return self._take_over_key(on, task)  # it runs: it may finish, the new one is the key's from now on
        values = {**values_of(task), "id": holder.id}
        values.pop("create_time")
        self._move(on, "replace", holder, {**values, "attempts": 0, "lapses": 0, "error_stack": None})
        return replace(task, id=holder.id, version=holder.version + 1, create_time=holder.create_time), True

    def _holder(self, on: Any, task: DelayTask, is_locked: bool) -> int | None:
        """The id that has the key of this task."""
        query = self._of_key.with_for_update() if is_locked else self._of_key
        found: int | None = on.execute(query, {"tag": task.tag, "task_key": task.key}).scalar()
        return found

    def _take_over_key(self, on: Any, task: DelayTask) -> tuple[DelayTask, bool]:
        on.execute(
            update(self._keys)
            .where(self._keys.c.tag == task.tag, self._keys.c.task_key == task.key)
            .values(task_id=task.id)
        )
        return self._insert_own(on, task)

    def _insert_own(self, on: Any, task: DelayTask) -> tuple[DelayTask, bool]:
        if self._insert_or_skip(on, self._insert, values_of(task)):
            return task, True
        raise DuplicateTaskError(f"there is a task with id {task.id} already", task.id)

    # -- look up ----------------------------------------------------------------------------------

    def get(self, id: int, on: Executor | None = None) -> DelayTask | None:
        row = self._read(lambda c: c.execute(self._get, {"task_id": id}).first(), on)
        return None if row is None else task_of(row)

    def id_of_key(self, tag: str, key: str, on: Executor | None = None) -> int | None:
        found: int | None = self._read(
            lambda c: c.execute(self._of_key, {"tag": tag, "task_key": key}).scalar(), on
        )
        return found

    def find(
        self,
        tag: str | None,
        status: Status | None,
        key: str | None,
        since: datetime | None,
        until: datetime | None,
        cursor: str | None,
        limit: int,
        on: Executor | None = None,
    ) -> Page:
        """In the order of their due times; a cursor stands for a place, so pages stay right while rows move."""
        t = self._t
        query = select(*self._columns).order_by(t.c.expected_time, t.c.id).limit(limit + 1)
        if tag is not None:
            query = query.where(t.c.tag == tag)
        if status is not None:
            query = query.where(t.c.status == int(status))
        if key is not None:
            query = query.where(t.c.task_key == key)
        if since is not None:
            query = query.where(t.c.expected_time >= since)
        if until is not None:
            query = query.where(t.c.expected_time < until)
        if cursor is not None:
            due, id = _parse_cursor(cursor)
            query = query.where(
                t.c.expected_time >= due, or_(t.c.expected_time > due, and_(t.c.expected_time == due, t.c.id > id))
            )
        rows = self._read(lambda c: c.execute(query).all(), on)
        tasks = [task_of(row) for row in rows[:limit]]
        return Page(tasks, _make_cursor(tasks[-1]) if len(rows) > limit else None)

    def counts(self) -> dict[Status, int]:
        query = select(self._t.c.status, func.count()).group_by(self._t.c.status)
        found = dict(self._read(lambda c: [tuple(row) for row in c.execute(query)], None))
        return {status: found.get(int(status), 0) for status in Status}

    def now(self) -> datetime:
        """Asked once: whoever wants the time has another way, and asks again soon."""

        def ask() -> datetime:
            with self._db.auto.connect() as connection:
                instant: datetime = connection.execute(select(db_now())).scalar_one()
                return instant

        return self._db.run(ask, tries=1)

    # -- move -------------------------------------------------------------------------------------

    def cancel(self, id: int, version: int | None = None, on: Executor | None = None) -> DelayTask | None:
        """The task as it was left, or None if it was cancelled already."""

        def work(connection: Any) -> DelayTask | None:
            task = self._found(connection, id, version, with_key=True)
            if task.status is Status.CANCELLED:
                return None
            if task.status is Status.RUNNING:
                raise CancelTooLateError(f"task {id} ({task.tag}) runs since {task.execution_time}", id)
            moved = self._move(connection, "cancel", task, {})
            self._release_key(connection, task)
            return moved

        return self._in_transaction(work, on, id)

    def reschedule(self, id: int, due: datetime, version: int | None = None, on: Executor | None = None) -> DelayTask:
        return self._in_transaction(
            lambda c: self._move(c, "reschedule", self._found(c, id, version), {"expected_time": due}), on, id
        )

    def retry(self, id: int, due: datetime, version: int | None = None, on: Executor | None = None) -> DelayTask:
        def work(connection: Any) -> DelayTask:
            task = self._found(connection, id, version, with_key=True)
            moved = self._move(connection, "retry", task, {"expected_time": due, "attempts": 0, "lapses": 0})
            if task.key is not None:
                self._take_key_again(connection, task)
            return moved

        return self._in_transaction(work, on, id)

    def touch(self, id: int, due: datetime, on: Executor | None = None) -> bool:
        """Later only, and no new version: what was armed for the old time arrives, and is found not due."""
        t = self._t
        statement = (
            update(t)
            .where(t.c.id == id, t.c.status.in_([int(s) for s in MOVES["reschedule"].sources]))
            .values(expected_time=case((t.c.expected_time < due, due), else_=t.c.expected_time), update_time=db_now())
        )

        def work(connection: Any) -> bool:
            if connection.execute(statement).rowcount:
                return True
            if connection.execute(self._get, {"task_id": id}).first() is None:
                raise TaskNotFoundError(f"there is no task {id}", id)
            return False

        return work(on) if on is not None else self._db.alone(work)

    def _move(self, on: Any, name: str, task: DelayTask, values: dict[str, Any]) -> DelayTask:
        """One move by an operator, fenced by the version that was read."""
        move, t = MOVES[name], self._t
        if task.status not in move.sources:
            allowed = ", ".join(sorted(s.name for s in move.sources))
            fact = f"task {task.id} ({task.tag}) is {task.status.name}"
            raise InvalidStatusError(f"{name}: {fact}, not {allowed}", task.id)
        values = {**values, "status": int(move.target), "version": task.version + 1, "update_time": db_now()}
        result = on.execute(update(t).where(t.c.id == task.id, t.c.version == task.version).values(**values))
        if not result.rowcount:
            raise StaleVersionError(f"{name}: task {task.id} moved on from version {task.version} meanwhile", task.id)
        return replace(
            task,
            status=move.target,
            version=task.version + 1,
            expected_time=values.get("expected_time", task.expected_time),
        )

    def _found(self, on: Any, id: int, version: int | None, with_key: bool = False) -> DelayTask:
        if with_key:
            row = on.execute(self._get, {"task_id": id}).first()
            if row is not None and row.task_key is not None:
                self._holder(on, task_of(row), is_locked=True)
        task = self._locked(on, id)
        if task is None:
            raise TaskNotFoundError(f"there is no task {id}", id)
        if version is not None and task.version != version:
            raise StaleVersionError(f"task {id} has version {task.version}, not {shown(version)}; read it again", id)
        return task

    def _locked(self, on: Any, id: int) -> DelayTask | None:
        row = on.execute(self._get.with_for_update(), {"task_id": id}).first()
        return None if row is None else task_of(row)

    # -- keys -------------------------------------------------------------------------------------

    def _release_key(self, on: Any, task: DelayTask) -> None:
        if task.key is not None:
            k = self._keys
            on.execute(delete(k).where(k.c.tag == task.tag, k.c.task_key == task.key, k.c.task_id == task.id))

    def _take_key_again(self, on: Any, task: DelayTask) -> None:
        if self._insert_or_skip(on, self._insert_key, _key_row(task)):
            return
        holder = self._holder(on, task, is_locked=True)
        if holder != task.id:
            raise DuplicateTaskError(f"retry: task {holder} has the key {task.key!r} of task {task.id} now", holder)

    # -- connections ------------------------------------------------------------------------------

    def together(self, work: Callable[[Any], T], unknown_id: int) -> T:
        """`work` with a connection whose transaction is committed after it; tried again as a whole."""
        return self._in_transaction(work, None, unknown_id)

    def _savepoint(self, on: Any) -> AbstractContextManager[Any]:
        if isinstance(on, Connection) and on._is_autocommit_isolation():
            return nullcontext()  # the caller wants each statement to stand alone
        if self._db.can.begins_late:
            # Only a statement that writes begins a transaction; without one the savepoint's end would commit.
            on.execute(delete(self._keys).where(false()))
        context: AbstractContextManager[Any] = on.begin_nested()
        return context

    def _in_transaction(self, work: Callable[[Any], T], on: Any, unknown_id: int | None = None) -> T:
        if on is not None:
            return work(on)

        def alone() -> T:
            with self._db.begin() as connection:
                return work(connection)

        return self._db.run(alone, unknown_id)

    def _read(self, work: Callable[[Any], Any], on: Any) -> Any:
        def read() -> Any:
            context: AbstractContextManager[Any] = self._db.auto.connect() if on is None else nullcontext(on)
            with context as connection:
                return work(connection)

        return read() if on is not None else self._db.run(read)


def _key_row(task: DelayTask) -> dict[str, Any]:
    return {"tag": task.tag, "task_key": task.key, "task_id": task.id}


def _is_duplicate(error: exc.IntegrityError) -> bool:
    code = getattr(error.orig, "pgcode", None) or (error.orig.args[0] if error.orig and error.orig.args else None)
    return code in ("23505", 1062) or (isinstance(code, str) and "UNIQUE" in code)


_COPY_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _copy_line(values: Any) -> str:
    return (
        "\t".join(
            "\\N" if value is None else value.translate(_COPY_ESCAPES) if isinstance(value, str) else str(value)
            for value in values
        )
        + "\n"
    )


def _make_cursor(task: DelayTask) -> str:
    return base64.urlsafe_b64encode(f"{to_us(task.expected_time)}:{task.id}".encode()).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, int]:
    try:
        due_us, _, id = base64.b64decode(cursor.encode(), b"-_", validate=True).decode().partition(":")
        due, after = from_us(int(due_us)), int(id)
    except (AttributeError, ValueError, OverflowError):
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() gave") from None
    if not -(2**63) <= after < 2**63:
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() gave")
    return due, after
