"""What methods of `DelayTasks` on single tasks share, and the caller's transaction of a call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.model.celery_calls import CELERY_PREFIX
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import (
    InvalidInputError,
    TaskCancelledError,
    TaskFailedError,
    TaskNotFoundError,
    TaskStateError,
    WaitTimeoutError,
)
from delaytasks.model.filters import Filters, filter_of
from delaytasks.model.ids import check_id
from delaytasks.model.inputs import check_key, check_page_limit, check_tag, check_wait
from delaytasks.model.moves import Status
from delaytasks.model.outcomes import MAX_RETRY_DELAY_S
from delaytasks.model.task import (
    CallerConnection,
    CancelResult,
    DelayedTask,
    Page,
    TouchResult,
    Transaction,
    connection_of,
    id_of,
)
from delaytasks.model.text import last_line, shown

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.model.inputs import Delay
    from delaytasks.runtime import Runtime


#: The first and the longest time between two reads of a row that a caller waits for.
FIRST_S, LONGEST_S = 0.02, 0.5
GROWTH = 1.5
#: A task that was read, an id, or a tag and a key.
TaskReference = DelayedTask | int | tuple[str, str]


class NamedTask(NamedTuple):
    id: int
    transaction: Transaction | None
    on: CallerConnection | None


@contextmanager
def named_task(
    runtime: Runtime, task: object, tag: str | None, key: str | None, session: Any
) -> Iterator[NamedTask]:
    """Find the task that a call names, in the transaction of the call.

    Errors of a driver inside the block become errors of ours.
    """
    name = name_of(task, tag, key)
    with runtime.transactions.guard(session) as transaction:
        on = connection_of(transaction)
        yield NamedTask(find_id(runtime.store, name, on), transaction, on)


def name_of(task: object, tag: str | None, key: str | None) -> TaskReference:
    """Return the checked name that the arguments of a call give."""
    if (task is None) == (key is None) or (key is not None and tag is None):
        raise InvalidInputError("name the task by its id, or by tag= and key=", "task")
    return (check_tag(tag), check_key(key)) if task is None else id_or_task(task)


def id_or_task(task: object) -> int | DelayedTask:
    """Return `task` itself if it was read, else the id, checked."""
    return task if isinstance(task, DelayedTask) else check_id(task)


def find_id(store: Store, name: TaskReference, on: CallerConnection | None) -> int:
    """Return the id of the task that a call names; look a key up."""
    if not isinstance(name, tuple):
        return id_of(name)
    tag, key = name
    id = store.tasks.id_of_key(tag, key, on)
    if id is None:
        raise TaskNotFoundError(f"no live task of tag {shown(tag)} has the key {shown(key)}")
    return id


def read_task(runtime: Runtime, task: object, tag: str | None, key: str | None) -> DelayedTask:
    """Read a task in a transaction of its own, which sees the end of the task."""
    return runtime.store.tasks.read(find_id(runtime.store, name_of(task, tag, key), None))


class Pauses:
    """The growing pauses between two reads of a task, until a time limit; None means no limit."""

    def __init__(self, timeout: Delay | None) -> None:
        self._pause_s = FIRST_S
        self._ends_at = self._limit_s = None
        if timeout is not None:
            self._limit_s = check_wait(timeout, MAX_RETRY_DELAY_S, "timeout")
            self._ends_at = monotonic() + self._limit_s

    def next(self, task: DelayedTask) -> float:
        """Return the seconds until the next read.

        Raises
        ------
        WaitTimeoutError
            If no time is left.
        """
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * GROWTH, LONGEST_S)
        if self._ends_at is None:
            return pause_s
        left_s = self._ends_at - monotonic()
        if left_s <= 0:
            remedy = "wait longer, or look at it later"
            if task.tag.startswith(CELERY_PREFIX):
                result = f"AsyncResult({shown(task.key)}).get()"
                remedy = f"this row sends a Celery task, so wait with {result}"
            raise WaitTimeoutError(
                f"task {task.id} ({task.tag}) is {task.status.name} after {self._limit_s:g} s: "
                f"{remedy}",
                task.id,
            )
        return min(pause_s, left_s)


def result_of(task: DelayedTask) -> Any:
    """Return the result of a task that has ended, or raise the error that says how it ended."""
    if task.status is Status.DONE:
        return task.result
    reason = f"task {task.id} ({task.tag}) is {task.status.name}"
    if task.error:
        reason = f"{reason}: {last_line(task.error)}"
    if task.status is Status.CANCELLED:
        raise TaskCancelledError(reason, task.id, task.status)
    raise TaskFailedError(reason, task.id)


def transaction_of_new(runtime: Runtime, session: Any, twin: str) -> Transaction | None:
    """Return the transaction of a new task, and warn of a call that stops an event loop.

    `twin` is the name of the call's asynchronous twin."""
    transaction = runtime.transactions.of(session)
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and transaction is None and asyncio._get_running_loop() is not None:
        from delaytasks.db.database import is_on_the_loop

        # Drivers of browsers run synchronous code beside a loop, and outside its tasks.
        if asyncio.current_task() is not None and not is_on_the_loop():
            warnings.warn(
                f"{twin[1:]} blocks the event loop of this coroutine: await {twin}",
                RuntimeWarning,
                stacklevel=3,
            )
    return transaction


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
        return runtime.store.tasks.find(where, limit, cursor, on, newest_first, time_limit_s)


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
        refused = CancelResult.of_refusal(error)
        if refused is None:
            raise
        return refused
    if cancelled is None:
        return CancelResult.cancelled_before(id)
    if cancelled.status is Status.RUNNING:
        runtime.events.emit("task.cancel_requested", **cancelled.event_fields)
        return CancelResult.requested(cancelled)
    runtime.events.emit("task.cancelled", **cancelled.event_fields)
    runtime.producer.disarm_after_commit(cancelled, transaction)
    return CancelResult.cancelled(cancelled)


def touch_tasks(
    runtime: Runtime, task: Any, delay: Delay | None, tag: str | None, key: Any, session: Any
) -> TouchResult:
    """Postpone timeouts, as `DelayTasks.touch` explains."""
    if (task is None) == (key is None) or (tag is None) != (key is None):
        raise InvalidInputError("name the tasks by their ids, or by tag= and key=", "task")
    touches = runtime.store.touches
    with runtime.transactions.guard(session) as transaction:
        due, on = runtime.producer.due_of(delay), connection_of(transaction)
        if key is None:
            if not is_several(task):
                id = id_of(task)
                return TouchResult.of([id], {id} if touches.touch(id, due, on) else set())
            ids = [id_of(each) for each in task]
            return TouchResult.of(ids, touches.touch_many(ids, due, on))
        tag = check_tag(tag)
        if not is_several(key):  # no other statement looks the key up
            waits = touches.touch_key(tag, check_key(key), due, on)
            return TouchResult.of([key], {key} if waits else set())
        keys = [check_key(each) for each in key]
        ids_of_keys = touches.ids_of_keys(tag, keys, on)
        touched = touches.touch_many(ids_of_keys.values(), due, on)
        return TouchResult.of(keys, {key for key, id in ids_of_keys.items() if id in touched})


def is_several(names: Any) -> bool:
    return isinstance(names, Iterable) and not isinstance(names, (str, bytes))


# -- Finds the transaction that a call belongs to -------------------------------------------------


class CallerTransactions:
    """The transaction of `session=`, or without it the one that a web framework has open."""

    def __init__(
        self, ambient: Callable[[], Transaction | None], remedy_at: Callable[[Any], str]
    ) -> None:
        """`remedy_at` says how to make the tables that a session on a URL does not find."""
        self._ambient = ambient
        self._remedy_at = remedy_at
        self._session: ContextVar[Any] = ContextVar("delaytasks_session", default=None)

    @contextmanager
    def using(self, session: Any) -> Iterator[None]:
        """Let calls without `session=` inside the block take part in the session's transaction."""
        token = self._session.set(session)
        try:
            yield
        finally:
            self._session.reset(token)

    def current_session(self) -> Any:
        """Return the session of the innermost block, or None."""
        return self._session.get()

    def of(self, session: Any) -> Transaction | None:
        session = self.current_session() if session is None else session
        if session is None:
            return self._ambient()
        from delaytasks.db.sessions import transaction_of

        return transaction_of(session, self._remedy_at)

    @contextmanager
    def guard(self, session: Any) -> Iterator[Transaction | None]:
        """Yield the transaction; translate driver errors inside the block into ours."""
        transaction = self.of(session)
        with transaction.guard() if transaction is not None else nullcontext():
            yield transaction
