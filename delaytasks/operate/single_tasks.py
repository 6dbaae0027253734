"""What methods of `DelayTasks` on single tasks share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from delaytasks.model.clock import monotonic
from delaytasks.model.errors import (
    BodyEncryptedError,
    InvalidInputError,
    TaskCancelledError,
    TaskFailedError,
    TaskNotFoundError,
    TaskStateError,
    WaitTimeoutError,
)
from delaytasks.model.filters import Filters, filter_of
from delaytasks.model.inputs import (
    CELERY_PREFIX,
    check_id,
    check_key,
    check_page_limit,
    check_tag,
    check_wait,
)
from delaytasks.model.moves import FINISHED, Status
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
    from delaytasks.db.store import Store
    from delaytasks.model.inputs import Delay
    from delaytasks.runtime import Runtime


#: The first and the longest time between two reads of a row that a caller waits for.
FIRST_S, LONGEST_S = 0.02, 0.5
GROWTH = 1.5
#: A task with one of these statuses cannot be cancelled any more.
_NOTHING_TO_CANCEL = (Status.RUNNING, *FINISHED)
#: A task that was read, an id, or a tag and a key.
TaskReference = DelayedTask | int | tuple[str, str]


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
    name = name_of(task, tag, key)
    with runtime.transactions.guard(session) as transaction:
        on = connection_of(transaction)
        yield find_id(runtime.store, name, on, is_to_move), transaction, on


def name_of(task: object, tag: str | None, key: str | None) -> TaskReference:
    """Return the checked name that the arguments of a call give."""
    if (task is None) == (key is None) or (key is not None and tag is None):
        raise InvalidInputError("name the task by its id, or by tag= and key=", "task")
    if task is None:
        return check_tag(tag), check_key(key)
    return task if isinstance(task, DelayedTask) else check_id(task)


def find_id(
    store: Store, name: TaskReference, on: CallerConnection | None, is_to_move: bool = False
) -> int:
    """Return the id of the task that a call names; look a key up."""
    if not isinstance(name, tuple):
        return id_of(name)
    tag, key = name
    id = store.tasks.ids_of_keys(tag, [key], on, is_to_move).get(key)
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
            self._limit_s = check_wait(timeout, "timeout")
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
        from delaytasks.operate.searches import limited_search

        database = runtime.store.database
        return limited_search(database, lambda own: find(on=own), time_limit_s)


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
