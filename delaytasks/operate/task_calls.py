"""The methods of `DelayTasks` on tasks that exist: on one task, and on all that a filter matches.

The operations on many tasks are `delays.bulk`. They move the tasks in small steps.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import Connection, event, exc

from delaytasks.loops import CallGroup, twin
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import (
    BodyEncryptedError,
    InvalidInputError,
    StoreError,
    StoreUnavailableError,
    TaskCancelledError,
    TaskFailedError,
    TaskNotFoundError,
    TaskStateError,
    WaitTimeoutError,
)
from delaytasks.model.filters import (
    BulkFilter,
    Filter,
    Filters,
    LogEntry,
    To,
    check_error,
    filter_of,
    new_due,
)
from delaytasks.model.inputs import (
    CELERY_PREFIX,
    MAX_DELAY_S,
    Spread,
    actor_of,
    check_id,
    check_key,
    check_page_limit,
    check_shift,
    check_tag,
    check_wait,
    parse_instant,
)
from delaytasks.model.moves import FINISHED, LIVE, MOVES, Status
from delaytasks.model.task import (
    CallerConnection,
    CancelResult,
    DelayedTask,
    Page,
    Transaction,
    connection_of,
    id_of,
    shown_json,
)
from delaytasks.model.text import shown
from delaytasks.operate.texts import last_line

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.db.database import Database
    from delaytasks.db.store import Store
    from delaytasks.model.inputs import Delay
    from delaytasks.runtime import Runtime

T = TypeVar("T")

# -- One task -------------------------------------------------------------------------------------


#: The first and the longest time between two reads of a row that a caller waits for.
FIRST_S, LONGEST_S = 0.02, 0.5
GROWTH = 1.5
#: A task with one of these statuses cannot be cancelled any more.
_NOTHING_TO_CANCEL = (Status.RUNNING, *FINISHED)


@contextmanager
def named_task(
    runtime: Runtime,
    task: object,
    tag: str | None,
    key: str | None,
    session: Any,
    is_to_move: bool = True,
) -> Iterator[tuple[int, Transaction | None, CallerConnection | None]]:
    """Yield the id of the task that a call names, the transaction of the call and its connection.

    Errors of a driver inside the block become errors of ours.
    """
    with runtime.transactions.guard(session) as transaction:
        on = connection_of(transaction)
        yield find_id(runtime.store, task, tag, key, on, is_to_move), transaction, on


def find_id(
    store: Store,
    task: object,
    tag: str | None,
    key: str | None,
    on: CallerConnection | None = None,
    is_to_move: bool = False,
) -> int:
    """Return the id of the task that the arguments of a call name; look a key up."""
    if (task is None) == (key is None) or (key is not None and tag is None):
        raise InvalidInputError("name the task by its id, or by tag= and key=", "task")
    if task is not None:
        return id_of(task)
    tag, key = check_tag(tag), check_key(key)
    id = store.tasks.ids_of_keys(tag, [key], on, is_to_move).get(key)
    if id is None:
        raise TaskNotFoundError(f"no live task of tag {shown(tag)} has the key {shown(key)}")
    return id


def read_task(runtime: Runtime, task: object, tag: str | None, key: str | None) -> DelayedTask:
    """Read a task in a transaction of its own, which sees the end of the task."""
    return runtime.store.tasks.read(find_id(runtime.store, task, tag, key))


def pauses(timeout: Delay | None) -> Iterator[float]:
    """Yield the growing pauses between two reads of a task, until a time limit; None means no
    limit."""
    ends_at = inf if timeout is None else monotonic() + check_wait(timeout, "timeout")
    pause_s = FIRST_S
    while (left_s := ends_at - monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(pause_s * GROWTH, LONGEST_S)


def result_of(task: DelayedTask) -> Any:
    """Return the result of a task, or raise the error that says how it ended, or that the time is
    over."""
    if task.status is Status.DONE:
        return task.result
    reason = f"task {task.id} ({task.tag}) is {task.status.name}"
    if not task.is_finished:
        remedy = "wait longer, or look at it later"
        if task.tag.startswith(CELERY_PREFIX):
            result = f"AsyncResult({shown(task.key)}).get()"
            remedy = f"this row sends a Celery task, so wait with {result}"
        raise WaitTimeoutError(f"{reason} after the timeout: {remedy}", task.id)
    if task.error:
        reason = f"{reason}: {last_line(task.error)}"
    if task.status is Status.CANCELLED:
        raise TaskCancelledError(reason, task.id, task.status)
    raise TaskFailedError(reason, task.id)


def pretty_body(task: DelayedTask) -> str:
    """Return the body as indented JSON, in which integers of any size are exact."""
    return _pretty(lambda: task.body, task.body_json)


def pretty_result(task: DelayedTask) -> str:
    return _pretty(lambda: task.result, task.result_json or "")


def _pretty(read: Callable[[], Any], stored: str) -> str:
    try:
        return json.dumps(read(), indent=2, ensure_ascii=False)
    except BodyEncryptedError:
        return str(shown_json(stored))
    except (ValueError, RecursionError):  # another program stored no JSON
        return stored


def find_tasks(
    runtime: Runtime,
    filters: Filters,
    cursor: str | None = None,
    limit: int = 100,
    newest_first: bool = False,
    session: Any = None,
    time_limit_s: float | None = None,
) -> Page:
    """Return a page of tasks. Without a session, `time_limit_s` may limit the search."""
    check_page_limit(limit)
    where = filter_of(filters)
    with runtime.transactions.guard(session) as transaction:
        on = connection_of(transaction)
        find = partial(runtime.store.tasks.find, where, limit, cursor, newest_first=newest_first)
        if time_limit_s is None or on is not None:
            return find(on=on)
        return limited_search(runtime.store.database, lambda own: find(on=own), time_limit_s)


def cancel_task(
    runtime: Runtime,
    task: object,
    tag: str | None = None,
    key: str | None = None,
    version: int | None = None,
    running: bool = False,
    session: Any = None,
) -> CancelResult:
    """Cancel a task, as `DelayTasks.cancel` explains."""
    try:
        with named_task(runtime, task, tag, key, session) as (id, transaction, on):
            cancelled = runtime.store.tasks.cancel(id, version, on, running)
    except TaskStateError as error:
        if not isinstance(error, TaskNotFoundError) and error.status not in _NOTHING_TO_CANCEL:
            raise
        if error.status is Status.CANCELLED:
            return CancelResult(False, f"task {id} was cancelled before", id, Status.CANCELLED)
        reason = str(error)
        if error.status is not None:
            reason = f"task {error.id} is {error.status.name}"
        return CancelResult(False, reason, error.id, error.status, error=error)
    name = f"task {id} ({cancelled.tag})"
    if cancelled.status is Status.RUNNING:
        runtime.events.emit("task.cancel_requested", **cancelled.event_fields)
        reason = f"{name} runs, and is asked to stop"
        return CancelResult(False, reason, id, Status.RUNNING, is_requested=True)
    runtime.events.emit("task.cancelled", **cancelled.event_fields)
    runtime.producer.arm_after_commit([], transaction)
    return CancelResult(True, f"{name} is cancelled", id, Status.CANCELLED)


def is_several(names: Any) -> bool:
    return isinstance(names, Iterable) and not isinstance(names, (str, bytes))


# -- Searches that end in time: some filters have no index, and read the whole table ---------------


class SearchTimeoutError(StoreError):
    """A search took too long. Narrow its filter, for example by a status."""


#: For the servers, 0 is no limit.
LEAST_LIMIT_S = 0.001
#: SQLite asks whether to go on each time it has executed this number of its instructions.
SQLITE_INSTRUCTIONS = 10_000


def limited_search(database: Database, work: Callable[[Any], T], limit_s: float) -> T:
    """Run a search of one or more statements.

    Each statement ends after `limit_s` seconds, and no statement begins later.

    Raises
    ------
    SearchTimeoutError
        If the search has reached the limit.
    """
    # Imported here: most processes search nothing.
    from delaytasks.db.engines import TIMED_OUT

    limit_s = max(limit_s, LEAST_LIMIT_S)

    def limited(connection: Connection) -> T:
        deadline = monotonic() + limit_s

        def check(*_: Any) -> None:
            if monotonic() > deadline:
                raise _timeout(limit_s)

        event.listen(connection, "before_cursor_execute", check)
        try:
            return work(connection)
        except exc.DBAPIError as error:
            if TIMED_OUT.caused(error.orig):
                raise _timeout(limit_s) from error
            raise
        finally:
            # The statement that resets the limit of the connection follows.
            event.remove(connection, "before_cursor_execute", check)

    return database.repeat(limited, partial(_limited, database, limit_s))


def _timeout(limit_s: float) -> SearchTimeoutError:
    return SearchTimeoutError(
        f"the search took longer than {limit_s:.1f} s: narrow its filter, for example by a status, "
        "a queue or a range of times"
    )


@contextmanager
def _limited(database: Database, limit_s: float) -> Iterator[Connection]:
    """Yield a connection whose statements end after `limit_s` seconds."""
    if database.backend == "postgresql":
        with database.begin() as connection:
            # It ends with the transaction, so that no pooled connection keeps it.
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(limit_s * 1000)}")
            yield connection
        return
    with database.auto.connect() as connection, database.bounded(connection):
        if database.backend == "sqlite":
            deadline, driver = monotonic() + limit_s, cast(Any, connection.connection)
            set_handler = driver.driver_connection.set_progress_handler
            set_handler(lambda: monotonic() > deadline, SQLITE_INSTRUCTIONS)
            reset: Callable[[], object] = partial(set_handler, None, 0)
        else:
            name, value = "max_execution_time", f"{limit_s * 1000:.0f}"
            if getattr(connection.dialect, "is_mariadb", False):
                name, value = "max_statement_time", f"{limit_s:.3f}"
            connection.exec_driver_sql(f"SET SESSION {name} = {value}")
            reset = partial(connection.exec_driver_sql, f"SET SESSION {name} = DEFAULT")
        try:
            yield connection
        finally:
            if not connection.invalidated:
                reset()


def error_filter(text: str) -> str:
    """Return the filter `error` of `find` for a text that a person typed: a part, or a pattern."""
    return check_error(text if "*" in text else f"*{text}*")


# -- All tasks that a filter matches --------------------------------------------------------------


#: An operation whose last step is older has ended, since its process died.
RUNNING_S = 60.0


class BulkOptions(Filters, total=False):
    """The filters and options of a bulk operation; `Bulk.cancel` explains them."""

    everything: bool
    dry_run: bool
    actor: str | None
    on_progress: OnProgress | None


@dataclass(frozen=True, slots=True)
class BulkResult:
    """The counts of a bulk operation, so far or at its end.

    Attributes
    ----------
    matched
        The number of tasks that matched the filter at the start.
    changed
        The number of tasks that were changed.
    refused
        The number of tasks that were left as they were. They run, changed in the meantime, are
        locked by another transaction, or another task has their key.
    started
        The start of the operation, by the clock of the database.
    runs
        The ids of the log entries. Empty after a dry run.

    Examples
    --------
    >>> result = delays.bulk.cancel(tag="mail.send")
    >>> result.changed, result.refused
    (1200, 3)
    """

    matched: int
    changed: int
    refused: int
    started: datetime
    runs: tuple[int, ...] = ()


#: Is called with the counts so far.
OnProgress = Callable[[BulkResult], object]


def bulk_filter_of(move: str, filters: Mapping[str, Any], everything: bool) -> BulkFilter:
    """Check the filters; raise `InvalidInputError` without any, unless `everything` is True."""
    where = filter_of(filters)
    if where == Filter() and not everything:
        problem = f"{move}: name the tasks (by tag=, key_prefix=, …), or say everything=True"
        raise InvalidInputError(problem, "everything")
    sources = MOVES[move].sources
    allowed = sources | (LIVE if MOVES[move].sources <= LIVE else frozenset())
    if wrong := (where.status or frozenset()) - allowed:
        problem = f"{move} is for tasks that are {_names(sources)}, not {_names(wrong)}"
        raise InvalidInputError(problem, "status")
    return BulkFilter(move, where)


def _names(statuses: Iterable[Status]) -> str:
    return ", ".join(sorted(status.name for status in statuses))


_NO_FILTERS = BulkOptions.__annotations__.keys() - Filters.__annotations__.keys()


class Bulk(CallGroup):
    """Operations on all tasks that match a filter, as `delays.bulk`.

    The tasks are found first and then changed in steps of some hundred rows, each a short
    transaction. Tasks that a worker or another caller changes in the meantime are left as they are
    and counted as refused. After an interruption, the same call continues. Each method has an
    asynchronous twin for coroutines, such as `acancel` for `cancel`.

    Examples
    --------
    >>> delays.bulk.cancel(tag="mail.send", key_prefix="eu-").changed
    1200
    """

    def cancel(self, **options: Unpack[BulkOptions]) -> BulkResult:
        """Cancel the waiting tasks that match a filter.

        Parameters
        ----------
        tag, ids, key, key_prefix, status, queue, meta, error : optional
            Filters, as in `DelayTasks.find`. A task must match all that are given.
        since, until, created_since, created_until, updated_until : datetime, optional
            Filters of the due time, the time of the first call and the last change: at or after
            `since`, before `until`.
        everything : bool, optional
            Must be True if no filter is given.
        dry_run : bool, optional
            Only count the tasks.
        actor : str, optional
            The name in the log. By default the user of this process.
        on_progress : callable, optional
            Is called after each step with the `BulkResult` so far.

        Returns
        -------
        BulkResult
            How many tasks matched, were changed and were refused.

        Raises
        ------
        InvalidInputError
            If there is no filter and `everything` is False, or a filter is wrong.
        StoreUnavailableError
            If the database cannot be reached.

        Examples
        --------
        >>> delays.bulk.cancel(tag="mail.send", key_prefix="eu-").changed
        1200
        """
        return self._move("cancel", None, options)

    acancel = twin(cancel)

    def reschedule(
        self,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        by: Delay | None = None,
        jitter: Delay | None = None,
        **options: Unpack[BulkOptions],
    ) -> BulkResult:
        """Give the waiting tasks that match a filter another due time.

        To continue an interrupted call with `by` or `jitter`, pass `updated_until=result.started`.
        Otherwise tasks that were shifted already are shifted again.

        Parameters
        ----------
        delay
            All tasks are due this time from now: seconds, text such as `"30m"`, or a timedelta.
        at
            All tasks are due at this instant.
        by
            Each task is due this time later than before; earlier, if negative.
        jitter
            Each task is due up to this time later than before, uniformly distributed. Overdue tasks
            are distributed from now on.
        **options
            See `cancel`.

        Returns
        -------
        BulkResult
            How many tasks matched, were changed and were refused.

        Raises
        ------
        InvalidInputError
            Unless exactly one of `delay`, `at`, `by` and `jitter` is given.
        DelayTaskError
            The errors of `cancel`.

        Examples
        --------
        >>> delays.bulk.reschedule(by=3600, tag="mail.send")
        >>> delays.bulk.reschedule(jitter="10m", tag="mail.send", since=nine, until=ten)
        """
        if [delay, at, by, jitter].count(None) != 3:
            rule = "give a delay, an instant (at), a shift (by) or a jitter, one of the four"
            raise InvalidInputError(rule, "delay")
        to: To
        if jitter is not None:
            over_s = check_wait(jitter, "jitter", MAX_DELAY_S, may_be_zero=False)
            to = Spread(timedelta(seconds=over_s))
        elif by is not None:
            to = check_shift(by)
        else:
            to = self._runtime.producer.due_of(delay, at)
        return self._move("reschedule", to, options)

    areschedule = twin(reschedule)

    def rerun(
        self,
        delay: Delay | None = None,
        *,
        entry: int | str | LogEntry | None = None,
        **options: Unpack[BulkOptions],
    ) -> BulkResult:
        """Run the FAILED tasks that match a filter again.

        Parameters
        ----------
        delay
            Seconds from now, text such as `"30m"`, or a timedelta. By default the tasks run now,
            and with `entry` each at its own due time.
        entry
            An entry of `log` about a `cancel`, or its id: the tasks that it has cancelled and that
            have not moved since run again. Those that have moved are refused, or are not counted
            if a filter is given, too.
        **options
            See `cancel`. With `status="CANCELLED"`, cancelled tasks run again instead.

        Returns
        -------
        BulkResult
            How many tasks matched, were changed and were refused. A task is refused if another
            live task has its key.

        Raises
        ------
        InvalidInputError
            If there is no such log entry, or it is of another operation.
        DelayTaskError
            The errors of `cancel`.

        Examples
        --------
        >>> delays.bulk.rerun(tag="mail.send", since=yesterday)
        >>> delays.bulk.rerun(entry=cancelled.runs[0])
        """
        producer = self._runtime.producer
        if entry is None:
            return self._move("rerun", producer.due_of(0 if delay is None else delay), options)
        options = {**options, "status": options.get("status") or Status.CANCELLED}
        to = timedelta() if delay is None else producer.due_of(delay)
        return self._move("rerun", to, options, _cancel_of(self._runtime, entry))

    arerun = twin(rerun)

    def log(self, *, limit: int = 100, before: int | None = None) -> list[LogEntry]:
        """Read what `cancel`, `reschedule` and `rerun` have done, and who has called them.

        Parameters
        ----------
        limit
            The most entries to return, 1 to 1,000.
        before
            Read only entries that are older than the one with this id: the last of a page before.

        Returns
        -------
        list of LogEntry
            The newest first: the actor, the filter, the counts and the state.

        Examples
        --------
        >>> delays.bulk.log(limit=1)[0].actor
        'maria'
        """
        check_page_limit(limit)
        if before is not None:
            before = check_id(before, "before")
        # The order is that of the ids, which contain the time in milliseconds.
        return self._runtime.store.bulk.audit.all(limit, before)

    alog = twin(log)

    def _move(
        self, move: str, to: To, options: BulkOptions, cancelled: LogEntry | None = None
    ) -> BulkResult:
        """Find the tasks, then move them.

        With `cancelled`, the tasks are those that this operation has cancelled.
        """
        filters = {name: value for name, value in options.items() if name not in _NO_FILTERS}
        which = bulk_filter_of(move, filters, options.get("everything", False))
        who = actor_of(options.get("actor"))
        run = BulkRun(self._runtime, which, to, cancelled)
        run.find()
        if not options.get("dry_run"):
            run.move(who, options.get("on_progress") or (lambda result: None))
        return run.result


def _cancel_of(runtime: Runtime, entry: object) -> LogEntry:
    """Return the entry of a cancel of many tasks that has ended."""
    id = check_id(entry.id if isinstance(entry, LogEntry) else entry, "entry")
    found = runtime.store.bulk.audit.get(id)
    if found is None:
        raise InvalidInputError(f"there is no log entry {id}; it may have been purged", "entry")
    if found.action != "cancel":
        rule = "only the tasks of a cancel can be rerun by their log entry"
        raise InvalidInputError(f"log entry {id} is of a {found.action}; {rule}", "entry")
    is_recent = runtime.clock.now() - found.seen_at < timedelta(seconds=RUNNING_S)
    if found.state == "running" and is_recent:
        problem = f"the operation of log entry {id} still runs: wait until it has ended"
        raise InvalidInputError(problem, "entry")
    return found


_BOUNDS = ("ids", "queue", "since", "until")


def _within(where: Filter, cancelled: LogEntry) -> Filter:
    """Narrow a filter by the ids, the queue and the due times of a cancel.

    They bound the part of an index that is read. A cancel does not change them.
    """
    missing = [name for name in _BOUNDS if getattr(where, name) is None]
    bounds = {name: cancelled.filter[name] for name in missing if name in cancelled.filter}
    for name in bounds.keys() & {"since", "until"}:
        bounds[name] = parse_instant(bounds[name], name)
    return replace(where, **{name: getattr(filter_of(bounds), name) for name in bounds})


def record_action(
    runtime: Runtime, action: str, what: dict[str, Any], actor: str, *, is_refused: bool = False
) -> None:
    """Write a log entry about one action of a person, such as a pause."""
    now, refused = runtime.clock.now(), int(is_refused)
    values = action, what, actor, "failed" if is_refused else "done", now, now, now
    entry = LogEntry(runtime.new_id(), *values, matched=1, changed=1 - refused, refused=refused)
    runtime.store.bulk.audit.begin(entry)


#: Rows in one transaction: few enough that locks on them are short.
BULK_ROWS = 500
#: Rows that other transactions have locked are tried again after this time.
BUSY_S = 1.0
EVENTS = {"cancel": "task.cancelled", "reschedule": "task.rescheduled", "rerun": "task.rerun"}


class BulkRun:
    """One bulk operation."""

    def __init__(
        self, runtime: Runtime, which: BulkFilter, to: To, cancelled: LogEntry | None = None
    ) -> None:
        """With `cancelled`, the tasks are those that this operation has cancelled."""
        self._runtime, self._store = runtime, runtime.store.bulk
        self._to, self._filter_as_given, self._cancelled = to, which.where, cancelled
        self._ids = array("q")
        #: The counts so far.
        self.result = BulkResult(0, 0, 0, started := runtime.store.database.now())
        # Each task is shifted once. Tasks that changed since the start are left out, because one of
        # our own steps may have changed them and its answer was lost.
        if isinstance(to, timedelta | Spread) and cancelled is None:
            until = min(which.where.updated_until or started, started)
            which = replace(which, where=replace(which.where, updated_until=until))
        elif cancelled is not None:
            where = _within(which.where, cancelled)
            which = replace(which, where=where, cancelled_by=cancelled.id)
        self._which = which

    def find(self) -> None:
        """Find the tasks. Running tasks are counted as refused."""
        refused = 0
        for rows in self._store.matching(self._which):
            self._ids.extend(id for id, status in rows if status in self._which.movable)
            refused += sum(status not in self._which.movable for _, status in rows)
        if self._cancelled and not self._filter_as_given.as_json().keys() - {"status"}:
            refused = self._cancelled.changed - len(self._ids)  # they have moved since
        self.result = replace(self.result, matched=len(self._ids) + refused, refused=refused)

    def move(self, actor: str, on_progress: OnProgress) -> None:
        """Change the tasks step by step, and call `on_progress` after each step.

        The log entry has the counts of each step, also after a crash.
        """
        which = self._filter_as_given.as_json()
        if self._cancelled is not None:
            which["entry"] = str(self._cancelled.id)
        which = which or {"everything": True}
        if self._to is not None:
            which["to"] = _as_text(self._to)
        id, started, audit = self._runtime.new_id(), self.result.started, self._store.audit
        times, counts = (started, started, None), (self.result.matched, *self._done)
        audit.begin(LogEntry(id, self._which.move, which, actor, "running", *times, *counts))
        self.result = replace(self.result, runs=(id,))
        try:
            if locked := self._change(self._ids, on_progress):
                time.sleep(BUSY_S)
                self._count(0, len(self._change(locked, on_progress)))
        except BaseException as error:
            state = "stopped" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            with suppress(StoreUnavailableError):  # the row stays "running"
                # The counts that the steps stored are right, and ours may not be.
                audit.end(id, state, None)
            raise
        audit.end(id, "done", self._done)

    @property
    def _done(self) -> tuple[int, int]:
        return self.result.changed, self.result.refused

    def _count(self, changed: int, refused: int) -> None:
        changed, refused = self.result.changed + changed, self.result.refused + refused
        self.result = replace(self.result, changed=changed, refused=refused)

    # -- steps ------------------------------------------------------------------------------------

    def _change(self, ids: Sequence[int], on_progress: OnProgress) -> Sequence[int]:
        """Change the tasks; return the ids that other transactions have locked."""
        locked = list[int]()
        for start in range(0, len(ids), BULK_ROWS):
            locked += self._step(ids[start : start + BULK_ROWS])
            on_progress(self.result)
        return locked

    def _step(self, ids: Sequence[int]) -> list[int]:
        """Change the tasks with these ids; return the ids that other transactions have locked."""
        [run] = self.result.runs
        step = self._store.step(run, self._which, ids, self._to, self._done)
        self._count(len(step.moved), step.refused)
        if step.moved:
            if self._which.move != "cancel":
                self._runtime.producer.arm_entries(step.moved)
            self._runtime.events.emit(EVENTS[self._which.move], count=len(step.moved))
        if step.keyed:
            self._rerun_keyed_tasks(step.keyed)
            self._store.audit.note(run, self._done)
        return step.busy

    def _rerun_keyed_tasks(self, keyed: Sequence[tuple[int, int, datetime]]) -> None:
        """Rerun tasks with a key one by one; since another task may have the key."""
        rerun: list[DelayedTask] = []
        for id, version, due in keyed:
            with suppress(TaskStateError):  # another task has the key, or this task has changed
                moved_to = new_due(id, due, self._to, self.result.started) or due
                rerun.append(self._runtime.store.tasks.rerun(id, moved_to, version))
        self._count(len(rerun), len(keyed) - len(rerun))
        if rerun:
            self._runtime.producer.arm(rerun)
            self._runtime.events.emit(EVENTS["rerun"], count=len(rerun))


def _as_text(to: datetime | timedelta | Spread) -> str:
    """Return what the log entry says about the new due times."""
    if isinstance(to, datetime):
        return to.isoformat()
    if isinstance(to, Spread):
        return f"spread over {to.over.total_seconds()} s"
    return f"{to.total_seconds()} s"
