"""A task, what callers say about a new one, and what calls, claims and settlements return of it."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from delaytasks.model.body import FIRST_VERSION, MAX_VERSION, PREFIX, dump_any, name_in
from delaytasks.model.clock import json_fields, to_us
from delaytasks.model.errors import BodyEncryptedError, InvalidInputError, TaskStateError
from delaytasks.model.inputs import (
    Delay,
    check_id,
    decode_meta,
    decode_object,
    is_integer,
    is_queue,
)
from delaytasks.model.moves import (
    FINISHED,
    MOVES,
    BroughtBy,
    Ending,
    RetrySchedule,
    SettlingMove,
    Status,
    late_start,
)
from delaytasks.model.policies import NO_WAITLISTS, WaitlistsSeen
from delaytasks.model.text import shown

# -- current run ----------------------------------------------------------------------------------

#: The call of a processor (`ProcessorCall` in `run/calls.py`), to which `task.complete` and
#: `task.check_lease` turn. A task itself is a plain value.
current_run: ContextVar[Any] = ContextVar("delaytasks_run", default=None)


# -- Stored texts, and a task as a JSON value ------------------------------------------------------


def is_encrypted(text: object) -> bool:
    return isinstance(text, str) and text.startswith(PREFIX)


_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # it is documented in no stub


def decoded(text: str, what: str) -> Any:
    """Return the value of a JSON text, or raise `BodyEncryptedError` if no key could decrypt it."""
    if is_encrypted(text):
        raise BodyEncryptedError(
            f"{what} is encrypted with key {name_in(text)}, which delaytasks_encryption_keys "
            "does not have here, or was changed since, or belongs to another task"
        )
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        end = -1
    # This searches for white space around the text, which takes longer than a short text.
    return value if end == len(text) else json.loads(text)


def shown_json(text: str | None) -> Any:
    """Return the decoded value if JSON can represent it, else the text.

    Python also decodes NaN and 1e400. Another text replaces one that no key could decrypt.
    """
    if text is not None and is_encrypted(text):
        return f"(encrypted with key {name_in(text)}, which cannot read it here)"
    try:
        value = json.loads(text or "null")
        dump_any(value)
    except (ValueError, RecursionError):  # another program stored no JSON
        return text
    return value


#: What programs and people get of a task.
_JSON_FIELDS = (
    "id tag key status queue priority body due_time expected_time execution_time late_start "
    "create_time update_time lease_until delay_s runs lapses version worker ip_address error "
    "headers limit_key meta result"
).split()
#: The queue of rows without one, such as rows of other programs.
DEFAULT_QUEUE = "default"
#: The `cancel_request` of a running task that was asked to stop.
ASKED = 1


# Not frozen: workers make one for each row, and a frozen one takes five times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class DelayedTask:
    """A row of `yb_delay_task_message` as it was when it was read.

    The object is for reading only. A changed attribute does not change the row, and a processor
    that changes its task loses the lease.

    Attributes
    ----------
    id
        The id.
    tag
        The tag, which names the processor.
    body_json
        The body as it is stored. `body` decodes it.
    expected_time
        The time of the next run.
    status
        The status.
    version
        A number that each move of the row increases.
    queue, priority
        The queue and the priority, 0 to 9.
    key
        The key, or None.
    delay_s
        The delay in seconds when the task was scheduled.
    runs
        The number of runs that have started, except those that snoozed or gave the task back.
    lapses
        The number of leases that were lost, because a worker died or hung.
    headers_json
        The options that differ from the processor's, as they are stored.
    limit_key
        The limit key, or None.
    create_time, update_time, execution_time
        The times of the first call, the last change and the start of the last run.
    due_time
        The due time, if a deferral has moved `expected_time`; else None. `due` is always set.
    meta_json
        The meta as it is stored. `meta` decodes it.
    cancel_request
        1 if the running task was asked to stop; the id of the log entry if `bulk.cancel` has
        cancelled the task; else None.
    late_by
        Why the last run that ended began late, as a number; `late_start` has the names. Else
        None.
    lease_until, worker, ip
        The end of the lease, the name of the worker and its IPv4 address as a number.
    error
        The traceback of the last failed attempt, or the reason of the status.
    result_json
        The result as it is stored. `result` decodes it.
    attempts
        The last failed attempts, if `get(attempts=True)` read the task.

    Examples
    --------
    >>> task = delays.get(tag="order.close", key="7")
    >>> task.status, task.body
    (<Status.NOT_COMPLETE: 0>, {'order': 7})
    """

    id: int
    tag: str
    body_json: str
    expected_time: datetime
    status: Status = Status.NOT_COMPLETE
    version: int = 0
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    key: str | None = None
    delay_s: int = 0
    runs: int = 0
    lapses: int = 0
    headers_json: str | None = None
    limit_key: str | None = None
    create_time: datetime | None = None
    due_time: datetime | None = None
    meta_json: str | None = None
    cancel_request: int | None = None
    late_by: int | None = None
    update_time: datetime | None = None
    execution_time: datetime | None = None
    lease_until: datetime | None = None
    worker: str | None = None
    ip: int | None = None
    error: str | None = None
    result_json: str | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def due(self) -> datetime:
        """The due time. Lateness and `max_late` count from it.

        `expected_time` is later while the task is deferred until a worker can run it.
        """
        return self.due_time or self.expected_time

    @property
    def late_start(self) -> tuple[str, str] | None:
        """What brought the last run, and why it did not begin earlier; None if it was in time.

        While the task runs, this is only known in its process.
        """
        late_by = self.late_by  # of a row that was held and has not run since, only the reason
        return None if late_by is None or late_by < BroughtBy.ENTRY else late_start(late_by)

    @property
    def body(self) -> Any:
        """The decoded body.

        Raises
        ------
        BodyEncryptedError
            If no encryption key of this process decrypts the body.
        ValueError
            If another program stored a body that is not JSON.
        """
        return decoded(self.body_json, f"the body of task {self.id}")

    @property
    def meta(self) -> dict[str, str]:
        """The pairs of strings that the caller gave to the task, such as a tenant."""
        return decode_meta(self.meta_json)

    def complete(self, session: Any = None, *, result: Any = None) -> None:
        """Make the task DONE in a transaction of its processor, which must commit it.

        The status and the processor's own changes are then committed together or not at all.

        Parameters
        ----------
        session
            A SQLAlchemy Session or Connection. With Django, the current connection by default.
        result
            A JSON value to store, as in `Done`.

        Raises
        ------
        TaskStateError
            If the call is not made by the processor of this task.
        LeaseLostError
            If the worker has lost the task's lease. The transaction must be rolled back.

        Examples
        --------
        >>> with Session.begin() as session:
        ...     session.add(Payment(order=task.body["order"]))
        ...     task.complete(session)
        """
        self._run("complete").complete(self.id, session, result)

    @property
    def is_cancelled(self) -> bool:
        """Whether the task is CANCELLED. In its processor: whether a caller asked it to stop.

        A long processor reads this, or calls `check_lease`, from time to time. Neither sends a
        query.
        """
        run = current_run.get()
        return self.status is Status.CANCELLED or (
            run is not None and bool(run.is_cancelled(self.id))
        )

    def check_lease(self) -> None:
        """Check, in a long run of the processor, that this worker still has the task's lease.

        The check sends no query. It compares the times of the worker's renewals.

        Raises
        ------
        TaskCancelledError
            If a caller has cancelled the task by `cancel(running=True)`. If the processor does not
            catch it, the task is CANCELLED.
        LeaseLostError
            If the lease could not be renewed, or the worker could not report, so that the task is
            about to run on another worker. The processor must not catch the error.
        TaskStateError
            If the call is not made by the processor of this task.

        Examples
        --------
        >>> for page in pages:
        ...     task.check_lease()
        ...     export(page)
        """
        self._run("check_lease").check_lease(self.id)

    def _run(self, what: str) -> Any:
        run = current_run.get()
        if run is None:
            raise TaskStateError(
                f"task {self.id} does not run here: {what}() is for its processor", self.id
            )
        return run

    @property
    def retry_schedule(self) -> RetrySchedule | None:
        """The task's own retry schedule, which replaces the one of its tag; None without one."""
        retry = self.headers.get("retry")
        if retry is None:
            return None
        try:
            return RetrySchedule(retry["retry_delays_s"], variation=retry["variation"])
        except (ValueError, TypeError, KeyError):  # written by another program
            return None

    @property
    def max_late_s(self) -> float | None:
        """The lateness in seconds after which the task is CANCELLED instead of run."""
        seconds: Any = self.headers.get("max_late_s")
        # Other programs may write any value, also an integer that no float can represent.
        return float(seconds) if type(seconds) in (int, float) and 0 <= seconds < 1e15 else None

    @property
    def body_version(self) -> int:
        """The version of the body; 1 if it was stored without a version."""
        version: Any = self.headers.get("body_version", FIRST_VERSION)
        if version == FIRST_VERSION:  # as of most rows, which have no headers
            return FIRST_VERSION
        return version if is_integer(version, FIRST_VERSION, MAX_VERSION) else FIRST_VERSION

    @property
    def result(self) -> Any:
        """The result of the processor, if it was registered with `keep_result=True`."""
        if self.result_json is None:
            return None
        return decoded(self.result_json, f"the result of task {self.id}")

    @property
    def headers(self) -> dict[str, Any]:
        """The decoded `headers_json`; empty if another program stored something else."""
        return {} if self.headers_json is None else decode_object(self.headers_json)

    @property
    def event_fields(self) -> dict[str, Any]:
        """The fields of each event about this task, and the task itself for subscribers."""
        fields: dict[str, Any] = {"id": self.id, "tag": self.tag, "task": self}
        if self.meta_json is not None:
            fields["meta"] = self.meta
        return fields

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    @property
    def ip_address(self) -> str | None:
        """The executing host's IPv4 address in dotted form."""
        try:
            return None if self.ip is None else str(ipaddress.IPv4Address(self.ip))
        except ValueError:
            return str(self.ip)  # written by another program

    def as_json(self) -> dict[str, Any]:
        """Return a JSON value. Ids are strings, since JavaScript rounds integers above 2^53."""
        decoded = {
            "id": str(self.id),
            "status": self.status.name,
            "body": shown_json(self.body_json),
            "due_time": self.due,
            "headers": shown_json(self.headers_json) if self.headers else {},
            "result": shown_json(self.result_json),
        }
        names = _JSON_FIELDS
        return json_fields(
            {name: decoded[name] if name in decoded else getattr(self, name) for name in names}
        )


#: What names one task: its id, or a task that was read.
TaskName = int | str | DelayedTask


def id_of(name: object) -> int:
    """Return the id of a task that was given as a task or as an id."""
    return name.id if isinstance(name, DelayedTask) else check_id(name)


# -- A task to schedule, before it is checked -----------------------------------------------------


class TaskOptions(TypedDict, total=False):
    """The options of a new task, which `DelayTasks.schedule_delay` explains.

    `Producer.build` checks the values.
    """

    key: str | None
    queue: str | None
    priority: int
    id: int | None
    retries: RetrySchedule | str | int | None
    max_late: Delay | None
    limit_key: str | None
    meta: Mapping[str, str] | None
    body_version: int | None
    jitter: Delay | None


# A tuple, because a frozen dataclass takes four times as long to make.
class NewTask(NamedTuple):
    """One task for `schedule_many`.

    Parameters
    ----------
    tag, body
        See `schedule_delay`.
    delay
        Seconds, text such as `"30m"`, or a timedelta. Give either `delay` or `at`.
    at
        An aware datetime.
    key, queue, priority, id, retries, max_late, limit_key, meta, body_version
        See `schedule_delay`.
    jitter
        See `schedule_delay`.

    Examples
    --------
    >>> delays.schedule_many(NewTask("mail.send", {"to": user}, 60, key=user) for user in users)
    """

    tag: str
    body: Any
    delay: Delay | None = None
    at: datetime | None = None
    key: str | None = None
    queue: str | None = None
    priority: int = 0
    id: int | None = None
    retries: RetrySchedule | str | int | None = None
    max_late: Delay | None = None
    limit_key: str | None = None
    meta: Mapping[str, str] | None = None
    body_version: int | None = None
    jitter: Delay | None = None


def new_task(
    tag: str, body: Any, delay: Any, at: datetime | None, options: Mapping[str, Any]
) -> NewTask:
    """Return the task of a call, or say which of our names a name of Celery's has."""
    try:
        return NewTask(tag, body, delay, at, **options)
    except TypeError as error:
        for name in CELERY_NAMES.keys() & options.keys():
            raise TypeError(f"{name}= is Celery's: write {CELERY_NAMES[name]}") from None
        raise TypeError(f"schedule_delay: {str(error).partition(' ')[2]}") from None


#: The options of `apply_async` that a user of Celery may try, and what to write instead.
CELERY_NAMES = {
    "countdown": "the seconds as the third argument",
    "eta": "at=",
    "expires": "max_late=, the longest time after the due time",
}


def new_task_of(item: object) -> NewTask:
    """Return the task to schedule that `schedule_many` was given."""
    if isinstance(item, NewTask):
        return item
    if isinstance(item, tuple) and len(item) == 3:
        tag, body, at = item
        return NewTask(tag, body, at=at) if isinstance(at, datetime) else NewTask(tag, body, at)
    rule = "schedule_many takes NewTask, or (tag, body, delay or instant)"
    raise InvalidInputError(f"{rule}, not {shown(item)}", "tasks")


OnConflict = Literal["reject", "keep", "replace", "take"]


# -- A page of tasks ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the tasks that `find` found. Iterating over it yields the tasks.

    Attributes
    ----------
    tasks
        The tasks.
    cursor
        The argument of `find` for the next page; None on the last page.

    Examples
    --------
    >>> page = delays.find(status="FAILED")
    >>> if page.cursor is not None:
    ...     page = delays.find(status="FAILED", cursor=page.cursor)
    """

    tasks: list[DelayedTask]
    cursor: str | None

    def __iter__(self) -> Any:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> DelayedTask:
        return self.tasks[index]


# -- A failed attempt to run a task ---------------------------------------------------------------


class Attempt(NamedTuple):
    """A failed run of a task.

    Attributes
    ----------
    number
        The number of the run, from 1.
    began, ended
        The start, if it is known, and the end.
    worker
        The name of the worker.
    error
        The traceback, or the reason that the processor returned.

    Examples
    --------
    >>> [attempt.ended for attempt in delays.get(task, attempts=True).attempts]
    """

    number: int
    began: datetime | None
    ended: datetime
    worker: str | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        return json_fields(self._asdict())


# -- The result of `touch` ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TouchResult:
    """The result of `touch`: true if all tasks still wait.

    Attributes
    ----------
    touched
        The ids, or the keys, of the tasks that wait at least as long as the call asked for.
    gone
        The ids, or the keys, of the tasks that no longer wait or do not exist.

    Examples
    --------
    >>> delays.touch(tag="device.offline", key=["d-17", "d-18"], delay=90).gone
    ['d-18']
    """

    touched: list[Any]
    gone: list[Any]

    def __bool__(self) -> bool:
        return not self.gone

    @classmethod
    def of(cls, names: Iterable[Any], waiting: Set[Any]) -> TouchResult:
        """Sort the names, without repetitions, by whether their tasks wait."""
        distinct = dict.fromkeys(names)
        gone = [name for name in distinct if name not in waiting]
        return cls([name for name in distinct if name in waiting], gone)


# -- The result of `cancel` -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The result of `cancel`: true only if this call cancelled the task, which then never starts.

    Attributes
    ----------
    is_cancelled
        Whether this call cancelled the task; also the truth value of the result.
    reason
        The outcome in words.
    id
        The id of the task. None only if no task was found by its key.
    status
        The status of the task after the call. None if no task was found.
    is_requested
        Whether the task runs, and this call has asked it to stop.
    error
        The reason as an error that can be raised, if no task could be cancelled.

    Examples
    --------
    >>> result = delays.cancel(tag="order.close", key="7")
    >>> if not result:
    ...     print(result.reason)
    """

    is_cancelled: bool
    reason: str
    id: int | None = None
    status: Status | None = None
    is_requested: bool = False
    error: TaskStateError | None = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.is_cancelled


# -- What claims, settlements and sweeps return, and what the timers keep -------------------------


class Entry(NamedTuple):
    """A task that is due within the horizon, as a timer keeps it and a message names it."""

    id: int
    version: int
    due_us: int
    queue: str = "default"
    priority: int = 0

    @classmethod
    def of(cls, task: DelayedTask) -> Entry:
        return cls(task.id, task.version, to_us(task.expected_time), task.queue, task.priority)

    def as_list(self) -> list[int]:
        """Return what a message about the entry's queue says."""
        return [self.id, self.version, self.due_us, self.priority]


def by_queue(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each queue, without those that workers refuse.

    Other programs may write such rows. The sweep finds them.
    """
    queues: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.id > 0 and entry.version >= 0 and entry.due_us >= 0:
            queues.setdefault(entry.queue, []).append(entry)
    return {queue: found for queue, found in queues.items() if is_queue(queue)}


class Claimed(list[DelayedTask]):
    """The tasks that a claim got, and the waitlists that it saw."""

    def __init__(
        self, tasks: Iterable[DelayedTask] = (), seen: WaitlistsSeen = NO_WAITLISTS
    ) -> None:
        super().__init__(tasks)
        self.seen = seen

    def add(self, other: Claimed) -> None:
        self.extend(other)
        self.seen = self.seen.merge(other.seen)


class Level(NamedTuple):
    """A queue and a priority that have waiting tasks."""

    queue: str
    priority: int


class QueuePlace(NamedTuple):
    """The position of a walk through all queues; None is the beginning.

    The fields are the last queue with tasks, and the last one with waitlists.
    """

    tasks: str | None = None
    waitlists: str | None = None


class Recovered(NamedTuple):
    """Abandoned rows: their worker died or lost its lease."""

    total: int
    #: The tasks that failed because they lost too many leases.
    worker_lost: Sequence[DelayedTask]
    #: Id and tag of the tasks that exceeded their time limit.
    timed_out: Sequence[tuple[int, str]] = ()
    #: The levels of the tasks that can run again.
    levels: Set[Level] = frozenset()


class Settlement(NamedTuple):
    """The move that ends one run, fenced by the version that the claim returned.

    Each task makes one, and a tuple takes a third of the time of a frozen dataclass.
    """

    task: DelayedTask
    move: SettlingMove
    began: datetime | None = None
    error: str | None = None
    #: The time of the next run.
    expected_time: datetime | None = None
    #: The due time that a deferred task keeps. None means that `expected_time` becomes the due
    #: time.
    due_time: datetime | None = None
    result: str | None = None
    #: The processor has settled the row itself, in its own transaction.
    is_made: bool = False

    @property
    def target(self) -> Status:
        return MOVES[self.move].target

    @property
    def ending(self) -> Ending:
        ending = MOVES[self.move].ending
        assert ending is not None
        return ending


#: Writes settlements, and returns the ids that were accepted.
Settle = Callable[[Sequence[Settlement]], set[int]]


class CallerConnection(Protocol):
    """The caller's database connection, as the storage uses it."""

    def execute(self, statement: Any, parameters: Any = None, /) -> Any: ...

    def begin_nested(self) -> AbstractContextManager[Any]: ...

    def in_transaction(self) -> bool: ...


class Transaction(Protocol):
    """A transaction of the caller; its tasks are armed after the commit."""

    #: Whether a web framework counts the tasks that were scheduled, moved or cancelled, and reports
    #: them if the commit is missing: `after_commit` is then also called for those that need no
    #: arming.
    reports_changes: bool

    @property
    def connection(self) -> CallerConnection: ...

    @property
    def stands_alone(self) -> bool:
        """Whether each statement is committed by itself, because there is no transaction."""
        ...

    def after_commit(self, tasks: Sequence[Any], action: Callable[..., None]) -> None:
        """Call `action(tasks)` after the commit.

        If only the moment before it is known, call `action(tasks, is_committed=False)` then.
        """
        ...

    def guard(self, unknown_id: int | None = None) -> AbstractContextManager[CallerConnection]:
        """Return the connection; its errors become `SessionUnusableError`.

        If each statement stands alone, a lost answer becomes `OutcomeUnknownError` with this id.
        """
        ...


def connection_of(transaction: Transaction | None) -> CallerConnection | None:
    return None if transaction is None else transaction.connection


class Timer(Protocol):
    """Brings tasks that are due within the horizon to a worker, which waits until they are due.

    A timer may lose entries, since the sweep dispatches overdue rows, and it may deliver them more
    than once, since only one claim of a version succeeds. Any thread may call its methods.
    """

    @property
    def is_up(self) -> bool:
        """Whether the last use of the timer's server succeeded."""
        ...

    def arm(self, entries: Iterable[Entry]) -> bool:
        """Arm the entries. Return False if some may not be armed: a sweep starts at them again, and
        those of a producer are found when they are overdue."""
        ...

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        """Ask workers to drain `queue`. Return False if no message could be sent."""
        ...
