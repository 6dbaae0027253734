"""The rows of tasks, with their keys and failed attempts: search, insert, read, cancel, reschedule,
touch and rerun."""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    SmallInteger,
    Table,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal_column,
    or_,
    select,
    true,
    update,
)

from delaytasks.db.database import Database
from delaytasks.db.engines import TRIES
from delaytasks.db.schema import Schema, by_id, check_row_count, columns, listed, moved
from delaytasks.db.statements import Insert, NewRows, insert_if_absent, task_of, values_of
from delaytasks.db.types import Capabilities, UTCDateTime, db_now, unindexed
from delaytasks.model.clock import from_us, to_us
from delaytasks.model.errors import (
    DuplicateTaskError,
    InvalidInputError,
    StaleVersionError,
    StoreUnavailableError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.model.filters import Filter, batches
from delaytasks.model.inputs import CELERY_PREFIX, pair_text
from delaytasks.model.moves import LIVE, MOVES, Status, following
from delaytasks.model.task import (
    ASKED,
    Attempt,
    CallerConnection,
    DelayedTask,
    Level,
    OnConflict,
    Page,
    Settlement,
)
from delaytasks.model.text import shown

T = TypeVar("T")
#: The columns that a move may change and that the caller of the move gets.
_RETURNED = ("expected_time", "due_time", "late_by", "runs", "lapses")
#: How often a row is looked at that is given back while it is asked to stop.
CANCEL_TRIES = 5
#: Rows in one transaction of a touch, so that their locks are short.
TOUCH_BATCH_ROWS = 2000
#: The keys or ids of one statement that looks for the rows of Celery tasks.
MOST_KEYS = 500


# -- The conditions of a filter --------------------------------------------------------------------


#: Not a backslash, which MySQL's string literals escape, too.
_ESCAPE = "!"


def conditions(tasks: Table, where: Filter, can: Capabilities) -> list[ColumnElement[bool]]:
    """Return the conditions of all filters except `status`, which decides about the index."""
    t = tasks.c
    comparisons = (
        (t.tag, operator.eq, where.tag),
        (t.task_key, operator.eq, where.key),
        (t.queue, operator.eq, where.queue),
        (t.expected_time, operator.ge, where.since),
        (t.expected_time, operator.lt, where.until),
        (t.create_time, operator.ge, where.created_since),
        (t.create_time, operator.lt, where.created_until),
        (t.update_time, operator.lt, where.updated_until),
    )
    found: list[ColumnElement[bool]] = [
        compare(column, value) for column, compare, value in comparisons if value is not None
    ]
    if where.ids is not None:
        ids = sorted(where.ids)
        # The range lets planners leave out partitions.
        found += [t.id.in_(ids), t.id.between(ids[0], ids[-1])]
    if where.key_prefix is not None:
        # Not LIKE, which ignores case in SQLite.
        found.append(func.substr(t.task_key, 1, len(where.key_prefix)) == where.key_prefix)
    if where.error is not None:
        found.append(t.error_stack.ilike(_like(where.error), escape=_ESCAPE))
    if where.meta is not None:
        find = func.strpos if can.arrays else func.instr
        found += [find(t.meta, pair_text(*pair)) > 0 for pair in where.meta]
    return found


def _like(pattern: str) -> str:
    """Return a pattern for LIKE, in which `*` stands for any text."""
    for special in (_ESCAPE, "%", "_"):
        pattern = pattern.replace(special, _ESCAPE + special)
    return pattern.replace("*", "%")


# -- queue levels ---------------------------------------------------------------------------------

# Steps through an index from one queue and priority to the next. The cost grows with their number,
# not with the rows.


def queue_levels(
    connection: Connection,
    t: Table,
    status: Status,
    queue: str | None = None,
    most_queues: int | None = None,
) -> list[Level]:
    """Return the priorities that have rows of this status, of one queue or of all (up to
    `most_queues`)."""
    if queue is not None:  # the other queues are not visited, since each costs a query
        return levels_of(connection, t, status, queue)
    queues = islice(distinct_values(connection, t.c.queue, has_status(t, status)), most_queues)
    return [level for each in queues for level in levels_of(connection, t, status, each)]


def levels_of(connection: Connection, t: Table, status: Status, queue: str) -> list[Level]:
    """Return the priorities of one queue that have rows of this status."""
    here = and_(has_status(t, status), t.c.queue == queue)
    return [Level(queue, priority) for priority in distinct_values(connection, t.c.priority, here)]


def queues_after(
    connection: Connection, t: Table, status: Status, after: str | None, most: int
) -> list[str]:
    """Return the next `most` queues that have rows of this status, in the database's order."""
    return list(islice(distinct_values(connection, t.c.queue, has_status(t, status), after), most))


def has_status(t: Table, *statuses: Status) -> ColumnElement[bool]:
    # Literals, since a parameter may be planned without the partial index of these rows.
    numbers = [literal_column(str(int(status)), SmallInteger) for status in sorted(statuses)]
    return t.c.status == numbers[0] if len(numbers) == 1 else t.c.status.in_(numbers)


def waits_between(t: Table, since: datetime, until: datetime) -> ColumnElement[bool]:
    """The condition for waiting rows due in (since, until]."""
    waits = unindexed(t.c.status) == int(Status.NOT_COMPLETE)
    return and_(waits, t.c.expected_time > since, t.c.expected_time <= until)


def distinct_values(
    connection: Any, column: Any, where: Any = None, after: Any = None
) -> Iterator[Any]:
    """Yield the distinct values of an index's column after the value `after`, one query for
    each."""
    # Not min(): if statistics are missing, PostgreSQL reads all rows of the queue for it.
    query = select(column).where(true() if where is None else where).order_by(column).limit(1)
    while True:
        later = query if after is None else query.where(column > after)
        after = connection.execute(later).scalar()
        if after is None:
            return
        yield after


# -- pages ----------------------------------------------------------------------------------------

# Pages of rows in the order of their due times. A cursor is a position, so pages stay right while
# rows move.


def first_page(
    connection: Any,
    query: Select[Any],
    tasks: Table,
    where: Filter,
    limit: int,
    newest_first: bool = False,
    most_queues: int | None = None,
) -> list[Any]:
    """Return the first rows of `query` by due time, or with `newest_first` the last ones.

    In the order of due times alone, a search for a few rows that failed or wait would read millions
    of finished rows. Rows of one status are therefore read through the index of their status, which
    has them in order within each queue and priority. This does not apply to a filter that has its
    own index: few rows have a given key, and a given tag may have no rows in most queues. Each
    queue costs a query or more: with `most_queues`, no further ones are read.
    """
    t = tasks.c
    order = (t.expected_time.desc(), t.id.desc()) if newest_first else (t.expected_time, t.id)
    query = query.order_by(*order).limit(limit)
    if where.status is None:
        return list(connection.execute(query))
    if where.ids is not None:
        named = unindexed(t.status).in_(sorted(map(int, where.status)))
        return list(connection.execute(query.where(named)))
    if where.has_own_index or Status.DONE in where.status:  # nearly all rows are DONE
        return list(connection.execute(query.where(has_status(tasks, *where.status))))
    found: list[Any] = []
    bounded = query
    for status in sorted(where.status):
        for level in queue_levels(connection, tasks, status, where.queue, most_queues):
            here = (t.queue == level.queue, t.priority == level.priority)
            found += connection.execute(bounded.where(has_status(tasks, status), *here))
            found = sorted(found, key=attrgetter("expected_time", "id"), reverse=newest_first)
            found = found[:limit]
            if len(found) == limit:  # later rows are not on this page
                last = found[-1].expected_time
                bounded = query.where(
                    t.expected_time >= last if newest_first else t.expected_time <= last
                )
    return found


def after_cursor(
    query: Select[Any], tasks: Table, cursor: str, newest_first: bool = False
) -> Select[Any]:
    """Limit `query`, which reads tasks, to the rows after the cursor's position."""
    due, id = _parse_cursor(cursor)
    at, number = tasks.c.expected_time, tasks.c.id
    if newest_first:
        return query.where(at <= due, or_(at < due, number < id))
    return query.where(at >= due, or_(at > due, number > id))


def make_cursor(task: DelayedTask) -> str:
    text = f"{to_us(task.expected_time)}:{task.id}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, int]:
    try:
        text = base64.b64decode(cursor.encode(), b"-_", validate=True).decode()
        due_us, id = text.split(":")
        due, number = from_us(int(due_us)), int(id)
        if not -(2**63) <= number < 2**63:
            raise ValueError
        return due, number
    except (AttributeError, ValueError, OverflowError):
        raise InvalidInputError(
            f"{shown(cursor)} is not a cursor that find() returned", "cursor"
        ) from None


# -- Keys name the live task of a tag -------------------------------------------------------------

# A move to and from a live status takes and frees the key. A key's row is always locked before its
# task's row. The other order could deadlock.


class TaskKeys:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._k = k = schema.keys
        self._insert = Insert(database, k, ("tag", "task_key", "task_id"))
        named = and_(k.c.tag == bindparam("tag"), listed(database, k.c.task_key, "task_keys"))
        self._find = select(k.c.task_key, k.c.task_id).where(named)

    def ids_of(
        self, on: Any, tag: str, keys: Sequence[str | None], is_locked: bool = False
    ) -> dict[str, int]:
        """Return the owners of the keys that are taken, by key. If the keys are locked, these tasks
        own them until the end of the transaction."""
        query = self._find.with_for_update() if is_locked else self._find
        return dict(on.execute(query, {"tag": tag, "task_keys": keys}).all())

    def owner_of(self, on: Any, task: DelayedTask, is_locked: bool = True) -> int | None:
        """Return the id of the task that owns the key of `task`, and lock the key."""
        return next(iter(self.ids_of(on, task.tag, [task.key], is_locked).values()), None)

    def take(self, on: Any, task: DelayedTask) -> bool:
        """Insert the key. Returns True if it was free."""
        return self._insert(on, {"tag": task.tag, "task_key": task.key, "task_id": task.id})

    def pass_to(self, on: Any, task: DelayedTask) -> bool:
        """Give a key that exists to this task. Returns False if it does not exist."""
        passing = update(self._k).where(self._named(task)).values(task_id=task.id)
        return bool(on.execute(passing).rowcount)

    def release(self, on: Any, task: DelayedTask) -> None:
        """Delete the key unless it names another task now."""
        if task.key is not None:
            on.execute(delete(self._k).where(self._named(task), self._k.c.task_id == task.id))

    def lock_all(self, on: Any, tasks: Sequence[Any], skip_locked: bool = True) -> list[Any]:
        """Lock the keys, and return the (id, tag, key) of `tasks` that still own theirs.

        With `skip_locked`, keys that another transaction has locked are left out."""
        return self._owners(on, tasks, lambda q: q.with_for_update(skip_locked=skip_locked))

    def owned(self, on: Any, tasks: Sequence[Any]) -> list[Any]:
        """Return the (id, tag, key) of `tasks` that own their key, whether it is locked or not."""
        return self._owners(on, tasks, lambda q: q)

    def _owners(
        self, on: Any, tasks: Sequence[Any], locked: Callable[[Select[Any]], Select[Any]]
    ) -> list[Any]:
        if not tasks:
            return []
        k = self._k.c
        query = select(k.task_id).where(self._named_all(tasks)).order_by(k.task_key, k.tag)
        owners = set(on.execute(locked(query)).scalars())
        return [task for task in tasks if task[0] in owners]

    def release_all(self, on: Any, tasks: Sequence[Any]) -> None:
        if tasks:
            on.execute(delete(self._k).where(self._named_all(tasks)))

    def _named_all(self, tasks: Sequence[Any]) -> ColumnElement[bool]:
        ids, tags, keys = ({task[part] for task in tasks} for part in range(3))
        # The key and the tag are named too, since there is no index on ids.
        return and_(
            self._k.c.task_key.in_(keys), self._k.c.tag.in_(tags), self._k.c.task_id.in_(ids)
        )

    def _named(self, task: DelayedTask) -> ColumnElement[bool]:
        return and_(self._k.c.tag == task.tag, self._k.c.task_key == task.key)


# -- Failed attempts, one row each. A task that succeeds at its first attempt has no row here -----


class Attempts:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._a = a = schema.attempts
        # A settlement whose answer was lost is sent again, and then its attempt exists already.
        self._add = insert_if_absent(database, a, a.c.version).values(ended=db_now())

    def record(self, on: Any, failed: Sequence[Settlement], worker: str) -> None:
        self._write(
            on, [(s.task.id, s.task.version, s.task.runs, s.began, worker, s.error) for s in failed]
        )

    def record_lost_leases(self, on: Any, rows: Iterable[Any], error: str) -> None:
        """Write the runs that lost their lease; `rows` are rows of the task table."""
        self._write(
            on, [(r.id, r.version, r.runs, r.execution_time, r.worker, error) for r in rows]
        )

    def _write(self, on: Any, attempts: Sequence[tuple[Any, ...]]) -> None:
        names = ("task_id", "version", "attempt", "began", "worker", "error")
        on.execute(self._add, [dict(zip(names, values, strict=True)) for values in attempts])

    def of(self, on: Any, id: int) -> list[Attempt]:
        a = self._a
        columns = (a.c.attempt, a.c.began, a.c.ended, a.c.worker, a.c.error)
        rows = on.execute(select(*columns).where(a.c.task_id == id).order_by(a.c.version))
        # The worker estimates the database's time for `began`, within a fraction of a millisecond,
        # and the database writes `ended`.
        return [
            Attempt(number, began and min(began, ended), ended, worker, error)
            for number, began, ended, worker, error in rows
        ]

    def forget(self, on: Any, ids: Sequence[int]) -> None:
        on.execute(delete(self._a).where(self._a.c.task_id.in_(ids)))


# -- cancel requests ------------------------------------------------------------------------------

# Requests to cancel running tasks. The version, which is the fence of the run, stays as it is.


#: The rows in which requests to cancel running tasks are counted.
_COUNTER_ROWS = 16


class CancelRequests:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t, self._n = schema.tasks, schema.cancel_requests
        self._insert = Insert(database, self._n, ("id", "number"))

    def make(self, on: Any, task: DelayedTask) -> bool:
        """Ask the run of this version to stop. Return False if it has ended meanwhile."""
        t = self._t
        this_run = update(t).where(t.c.id == task.id, t.c.version == task.version)
        asking = this_run.where(has_status(t, Status.RUNNING)).values(cancel_request=ASKED)
        if not on.execute(asking).rowcount:
            return False
        # Workers look for the request within a second after the sum of these rows has changed,
        # which they read with the policies. The row stays locked until the commit, so that there
        # are several.
        n, id = self._n, task.id % _COUNTER_ROWS
        counting = update(n).where(n.c.id == id).values(number=n.c.number + 1)
        if not on.execute(counting).rowcount:
            self._insert(on, {"id": id, "number": 0})
            check_row_count(on.execute(counting).rowcount, 1, "the number of requests")
        return True

    def of(self, workers: Collection[str]) -> list[tuple[int, int]]:
        """Return id and version of the rows of these processes that were asked to stop."""
        t = self._t
        runs_here = and_(has_status(t, Status.RUNNING), t.c.worker.in_(list(workers)))
        query = select(t.c.id, t.c.version).where(runs_here, t.c.cancel_request == ASKED)
        return [(row[0], row[1]) for row in self._db.rows(query)]


# -- The rows of tasks ----------------------------------------------------------------------------


class Tasks:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._schema = schema
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self.new = NewRows(database, schema)
        self._select = select(*columns(schema))
        self._get = self._select.where(t.c.id == bindparam("task_id"))
        self.cancel_requests = CancelRequests(database, schema)
        is_live = t.c.status.in_([int(status) for status in LIVE])
        self._live_of_celery = self._select.where(t.c.tag.like(f"{CELERY_PREFIX}%"), is_live)
        self._prepare_touches()

    # -- schedule ---------------------------------------------------------------------------------

    def insert_keyed(
        self, task: DelayedTask, on_conflict: OnConflict, on: CallerConnection | None = None
    ) -> tuple[DelayedTask, bool] | None:
        """Return the task that owns the key afterwards, and whether it was written now.

        Return None if another task has the id.
        """

        def work(connection: Any) -> tuple[DelayedTask, bool]:
            with self.new.savepoint(on):  # an id that exists must not leave its key behind
                owner, is_new = self._take_key(connection, task, on_conflict)
                if owner is task and not self.new.add(connection, values_of(task, self._schema)):
                    raise DuplicateTaskError(f"there is a task with id {task.id} already", task.id)
                return owner, is_new

        try:
            return work(on) if on is not None else self._db.repeat(work, self._db.begin, task.id)
        except DuplicateTaskError as error:
            if error.id != task.id:  # of the key
                raise
        return (task, True) if self.new.was_written(task, on) else None

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

    def ids_of_keys(
        self,
        tag: str,
        keys: Iterable[str],
        on: CallerConnection | None = None,
        is_to_move: bool = False,
    ) -> dict[str, int]:
        """Return the ids of live tasks by their keys, to read the tasks or to move them."""
        wanted, found = sorted(set(keys)), dict[str, int]()
        for batch in batches(wanted, TOUCH_BATCH_ROWS):
            find = partial(self._keys.ids_of, tag=tag, keys=batch)
            found.update(self._db.autocommitted(find, on))
        if not is_to_move or on is None or not self._db.can.reads_as_of_start:
            return found
        # A transaction that reads as of its start does not see who has a key now. Only a locking
        # read does: a caller that cancels the key's task must not reach the previous owner. It is
        # for keys that have moved only, since the task may be running, and be settled soon.
        current = self.ids_of_keys(tag, wanted)
        moved_keys = [key for key in wanted if current.get(key) not in (None, found.get(key))]
        for key in moved_keys:
            found.pop(key, None)
            found.update(self._keys.ids_of(on, tag=tag, keys=[key], is_locked=True))
        return found

    def attempts(self, id: int, on: CallerConnection | None = None) -> list[Attempt]:
        return self._db.autocommitted(lambda c: self._attempts.of(c, id), on)

    def find(
        self,
        where: Filter,
        limit: int,
        cursor: str | None = None,
        on: CallerConnection | None = None,
        newest_first: bool = False,
    ) -> Page:
        """Return a page of tasks in the order of their due times."""
        t = self._t
        query = self._select.where(*conditions(t, where, self._db.can))
        if where.ids is not None:
            query = by_id(query, t)
        if cursor is not None:
            query = after_cursor(query, t, cursor, newest_first)

        def read(connection: Any) -> list[Any]:
            return first_page(connection, query, t, where, limit + 1, newest_first)

        rows = self._db.autocommitted(read, on)
        tasks = [task_of(row, self._schema) for row in rows[:limit]]
        return Page(tasks, make_cursor(tasks[-1]) if len(rows) > limit else None)

    def now(self, insists: bool = False) -> datetime:
        """Return the database's time. Unless the caller insists, an error is not tried again."""
        return self._db.now(TRIES if insists else 1)

    def celery_rows(
        self, keys: Sequence[str], ids: Sequence[int] = (), on: CallerConnection | None = None
    ) -> list[DelayedTask]:
        """Return the rows of Celery tasks with these keys or ids that wait or run."""

        def read(connection: Any) -> list[Any]:
            found: list[Any] = []
            for column, names in ((self._t.c.task_key, keys), (self._t.c.id, ids)):
                query = self._live_of_celery.where(listed(self._db, column, "names"))
                for some in batches(names, MOST_KEYS):
                    found += connection.execute(query, {"names": some})
            return found

        return [task_of(row, self._schema) for row in self._db.autocommitted(read, on)]

    # -- move -------------------------------------------------------------------------------------

    def cancel(
        self,
        id: int,
        version: int | None = None,
        on: CallerConnection | None = None,
        running: bool = False,
    ) -> DelayedTask:
        """Return the task as it was left. With `running`, a running task is asked to stop."""

        def work(connection: Any) -> DelayedTask:
            for number in range(CANCEL_TRIES):
                try:
                    task = self._move(connection, "cancel", id, version, {}, self._keys.owner_of)
                except TaskStateError as error:
                    is_running = error.status is Status.RUNNING
                    if not (running and is_running) or number == CANCEL_TRIES - 1:
                        raise
                else:
                    self._keys.release(connection, task)
                    return task
                found = self.read(id, connection)
                if self.cancel_requests.make(connection, found):
                    return replace(found, cancel_request=ASKED)
                # The run has ended between these statements, and the row may wait again.
            raise AssertionError("unreachable")

        return self._db.transaction(work, on, id)

    def reschedule(
        self, id: int, due: datetime, version: int | None = None, on: CallerConnection | None = None
    ) -> DelayedTask:
        move = partial(
            self._move, name="reschedule", id=id, version=version, values={"expected_time": due}
        )
        return self._db.transaction(move, on, id)

    def rerun(
        self, id: int, due: datetime, version: int | None = None, on: CallerConnection | None = None
    ) -> DelayedTask:
        """Let a finished task wait again, with its key."""
        values = {"expected_time": due, "runs": 0, "lapses": 0}

        def take_key(connection: Any, task: DelayedTask) -> None:
            try:
                self._take_key(connection, task, "reject")
            except DuplicateTaskError as error:
                fact = f"task {error.id} has the key {task.key!r} of task {id} now"
                raise DuplicateTaskError(f"rerun: {fact}", error.id) from None

        def work(connection: Any) -> DelayedTask:
            with self.new.savepoint(on):  # a refusal must not leave the key behind
                return self._move(connection, "rerun", id, version, values, take_key)

        return self._db.transaction(work, on, id)

    def _move(
        self,
        on: Any,
        name: str,
        id: int,
        version: int | None,
        values: dict[str, Any],
        lock_key: Callable[[Any, DelayedTask], object] | None = None,
    ) -> DelayedTask:
        """Move one task, and return it as it is then.

        The first try locks nothing before the move is known to be allowed: a caller whose
        transaction stays open would keep the lock, and the worker that runs the row could not
        settle it. If the row has moved meanwhile, or is not seen by a transaction that reads as of
        its start, the second try locks and reads it as it is now.
        """
        for get in (self._get, self._get.with_for_update()):
            row = on.execute(get, {"task_id": id}).first()
            if row is None:
                continue
            task = task_of(row, self._schema)
            if isinstance(version, int) and task.version < version and get is self._get:
                continue  # a transaction that reads as of its start sees an earlier version
            if version is not None and task.version != version:
                fact = f"task {id} has version {task.version}, not {shown(version)}"
                raise StaleVersionError(f"{fact}; read it again", id)
            sources = MOVES[name].sources
            if task.status not in sources:
                allowed = ", ".join(sorted(s.name for s in sources))
                fact = f"{name}: task {id} ({task.tag}) is {task.status.name}, not {allowed}"
                raise TaskStateError(fact, id, task.status)
            if lock_key is not None and task.key is not None:
                lock_key(on, task)
            if (made := self._update(on, name, task, values)) is not None:
                return made
        if row is None:
            raise TaskNotFoundError(f"there is no task {id}", id)
        # This happens only if each statement is a transaction, so that no lock lasts.
        raise StaleVersionError(f"{name}: task {id} has moved meanwhile; read it again", id)

    def _update(
        self, on: Any, name: str, task: DelayedTask, values: dict[str, Any]
    ) -> DelayedTask | None:
        """Update the row, fenced by the version that was read. Return None if it has moved."""
        t = self._t
        if "expected_time" in values:
            # expected_time is the due time again, and the row was not held since.
            values = {**values, "due_time": None, "late_by": None}
        # A request to cancel was for an earlier run.
        changed = moved(t, name, cancel_request=None, **values)
        this = update(t).where(t.c.id == task.id, t.c.version == task.version)
        if not on.execute(this.values(changed)).rowcount:
            return None
        kept = {name: values[name] for name in _RETURNED if name in values}
        return replace(task, status=MOVES[name].target, version=following(task.version), **kept)

    # -- the owner of a key: takes, keeps, replaces or passes on the key that another task wants ---

    def _take_key(
        self, on: Any, task: DelayedTask, on_conflict: OnConflict
    ) -> tuple[DelayedTask, bool]:
        """Return the task that owns the key afterwards, and whether the key or the row is new.

        If the owner is `task` itself, its row has yet to be written.
        """
        owner_id = self._take_or_lock(on, task)
        if owner_id is None:
            return task, True
        row = on.execute(self._get.with_for_update(), {"task_id": owner_id}).first()
        owner = None if row is None else task_of(row, self._schema)
        if owner is None or owner.is_finished:
            # The owner was purged, or another program finished it.
            return self._take_over(on, task)
        if owner.id == task.id:
            return owner, False
        if on_conflict == "reject":
            raise DuplicateTaskError(
                f"task {owner.id} ({owner.status.name}, due {owner.due.isoformat()}) has the key "
                f"{task.key!r} of tag {task.tag!r}; pass on_conflict='keep' or 'replace'",
                owner.id,
            )
        if on_conflict == "keep":
            return owner, False
        if on_conflict == "take" or owner.status not in MOVES["replace"].sources:
            # The owner waits or runs, and may finish. From now on the key belongs to the new task.
            return self._take_over(on, task)
        # The row keeps its id, to which the encryption of the new body is bound.
        new = replace(task, id=owner.id)
        values = values_of(new, self._schema)
        for name in ("id", "status", "version", "create_time", "update_time"):
            del values[name]
        values |= {"runs": 0, "lapses": 0, "error_stack": None}
        if self._update(on, "replace", owner, values) is None:
            raise _changed_too_often(task)
        version = following(owner.version)
        return replace(new, version=version, create_time=owner.create_time), True

    def _take_or_lock(self, on: Any, task: DelayedTask) -> int | None:
        """Take the key if it is free, else lock it and return the id of its owner."""
        for attempt in range(TRIES):
            # In MySQL a failed INSERT would leave a lock on the key, so the key is read first.
            is_free = (
                self._db.can.insert_or_skip
                or self._keys.owner_of(on, task, is_locked=attempt > 0) is None
            )
            if is_free and self._keys.take(on, task):
                return None
            # The key's row is locked before the task's, as in settling and cancelling. Else they
            # could deadlock.
            owner_id = self._keys.owner_of(on, task)
            if owner_id is not None:
                return owner_id
            # The owner has just ended.
        raise _changed_too_often(task)

    def _take_over(self, on: Any, task: DelayedTask) -> tuple[DelayedTask, bool]:
        if not self._keys.pass_to(on, task):
            # This happens only if each statement is a transaction, so that no lock lasts.
            raise _changed_too_often(task)
        return task, True

    # -- touch: moves a timeout to a later due time without a new version -------------------------

    # A message for the old time still arrives, and finds that the row is not due.

    def _prepare_touches(self) -> None:
        t, k, due = self._t, self._schema.keys, bindparam("due", type_=UTCDateTime())
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
        named = listed(self._db, t.c.id, "ids")
        self._touch = touch.where(t.c.id == bindparam("task_id"), waits)
        self._touch_key = touch.where(t.c.id == of_key.scalar_subquery(), waits)
        self._touch_listed = touch.where(named)
        waiting = select(t.c.id).where(named, waits).order_by(t.c.id)
        self._lock = waiting.with_for_update()
        self._lock_free = waiting.with_for_update(skip_locked=True)

    def touch(self, id: int, due: datetime, on: CallerConnection | None = None) -> bool:
        """Move one timeout. Returns False if the task no longer waits."""

        def work(connection: Any) -> bool:
            if connection.execute(self._touch, {"task_id": id, "due": due}).rowcount:
                return True
            self.read(id, connection)
            return False

        return self._db.autocommitted(work, on)

    def touch_key(
        self, tag: str, key: str, due: datetime, on: CallerConnection | None = None
    ) -> bool:
        """Do the same by key, in one statement."""

        def work(connection: Any) -> bool:
            named = {"of_tag": tag, "of_key": key, "due": due}
            if connection.execute(self._touch_key, named).rowcount:
                return True
            if not self._keys.ids_of(connection, tag, [key]):
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
        # In transactions of our own, rows that another transaction has locked come last, so that no
        # other timeout waits for them.
        for lock in (self._lock_free, self._lock) if on is None else (self._lock,):
            for batch in batches(sorted(wanted - touched), TOUCH_BATCH_ROWS):
                work = partial(self._touch_batch, lock=lock, ids=batch, due=due)
                touched.update(self._db.transaction(work, on))
        return touched

    def _touch_batch(self, on: Any, lock: Select[Any], ids: list[int], due: datetime) -> list[int]:
        """Touch in the order of ids, in which every transaction locks rows. Else two could
        deadlock."""
        waiting: list[int] = on.execute(lock, {"ids": ids}).scalars().all()
        if waiting:
            changed = on.execute(self._touch_listed, {"ids": waiting, "due": due}).rowcount
            check_row_count(changed, len(waiting), "tasks to touch")
        return waiting


def _changed_too_often(task: DelayedTask) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"key {task.key!r} of tag {task.tag!r} changed its owner {TRIES} times; try again"
    )
