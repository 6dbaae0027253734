"""`DelayTasks`, the public API: schedule, look up, change and limit the tasks of one Celery app.

A method works with the parts of a `Runtime` (`delaytasks/runtime.py`), which are made by their
first use. Most of the lines are docstrings.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast, overload

from delaytasks.attachment import attach, forced
from delaytasks.events import Events
from delaytasks.loops import twin
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import (
    ANY_CELERY_TASK,
    CALLBACK,
    CALLBACKS_IN_FLIGHT,
    MESSAGE,
    Delay,
    check_key,
    check_tag,
)
from delaytasks.model.moves import RetrySchedule
from delaytasks.model.task import (
    CancelResult,
    DelayedTask,
    NewTask,
    Page,
    TaskName,
    TouchResult,
    connection_of,
    id_of,
    new_task,
    new_task_of,
)
from delaytasks.model.text import TABLES_REMEDY
from delaytasks.operate.policy_calls import PolicyCalls
from delaytasks.operate.task_calls import (
    Bulk,
    cancel_task,
    find_tasks,
    is_several,
    named_task,
    pauses,
    read_task,
    result_of,
)
from delaytasks.registry import MAX_BATCH, Processor, Registry, tags_of
from delaytasks.settings import hide_secrets

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.callbacks.sending import Callback, CallbackCalls, Message
    from delaytasks.db.sessions import ConnectionSource
    from delaytasks.model.filters import Filters
    from delaytasks.model.moves import Outcome
    from delaytasks.model.task import OnConflict, TaskOptions, Transaction
    from delaytasks.operate.checks import Finding
    from delaytasks.operate.forecast import Forecast
    from delaytasks.operate.statistics import Statistics
    from delaytasks.recurring.recurring import Recurring
    from delaytasks.registry import CommonOptions, Decorator, P, ProcessorOptions, Returned
    from delaytasks.runtime import AsyncCalls, ProcessorContext, Runtime
    from delaytasks.settings import Settings
    from delaytasks.worker.processes import Processes


# A process imports the package of callbacks with the first callback.


def _callback_of(body: Any) -> Callback:
    from delaytasks.callbacks.sending import Callback

    return Callback(**body)


def _message_of(body: Any) -> Message:
    from delaytasks.callbacks.sending import Message

    return Message(**body)


class DelayTasks:
    """Delayed tasks for one Celery app.

    After this, `celery -A proj worker` runs due tasks and `celery -A proj beat` sweeps the table.

    Parameters
    ----------
    celery_app
        The Celery app that serves the tasks. A Celery app has at most one `DelayTasks`.
    database_url
        The SQLAlchemy URL of the database.
        Without it, the setting `delaytasks_database_url` or the variable
        `DELAYTASKS_DATABASE_URL` names the database, else an SQLite file is used.
    **settings
        Any setting, without the prefix `delaytasks_`. These values take precedence over the Celery
        configuration and the environment.

    Raises
    ------
    ConfigError
        If the Celery app has a `DelayTasks` already. Wrong settings raise it with the first call
        that needs them.

    Examples
    --------
    >>> delays = DelayTasks(celery_app, database_url="postgresql://localhost/shop")
    >>> @delays.processor("order.close")
    ... def close_order(body): ...
    >>> delays.schedule_delay("order.close", {"order": 7}, 1800)
    """

    #: How to make the tables, for messages. The integrations with web frameworks name their own
    #: commands.
    _tables_remedy = TABLES_REMEDY

    def __init__(self, celery_app: Any, database_url: str | None = None, **settings: Any) -> None:
        if database_url is not None:
            settings["database_url"] = database_url
        self._arguments = hide_secrets(settings)
        self._celery = celery_app
        self._registry = Registry()
        self._events = Events()
        self._lock = threading.RLock()
        self._made: Runtime | None = None
        self._is_in_test = False
        own, retries, in_flight = self.processor, RetrySchedule.NOTIFY, CALLBACKS_IN_FLIGHT
        own(CALLBACK, retries=retries, schema=_callback_of, in_flight=in_flight)(self._call_back)
        own(MESSAGE, retries=retries, schema=_message_of)(self._send_message)
        own(ANY_CELERY_TASK, retries=retries, batch=MAX_BATCH)(self._publish_tasks)
        if celery_app is not None:
            attach(celery_app, self)

    # -- schedule ---------------------------------------------------------------------------------

    def schedule_delay(
        self,
        tag: str,
        body: Any,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a task: run the processor of `tag` with `body`, after a delay or at an instant.

        Parameters
        ----------
        tag
            The name of the processor.
        body
            The argument of the processor: any value that JSON can represent.
        delay
            Seconds, text such as `"30m"`, or a timedelta.
        at
            An aware datetime, instead of `delay`. An instant in the past means now.
        on_conflict
            The rule for a key that a live task has. `"reject"` raises `DuplicateTaskError`,
            `"keep"` returns the existing task, and `"replace"` gives the existing task the new
            body and due time. With `"take"` both tasks run, and the key names the new one.
        session
            A SQLAlchemy Session or Connection. The row becomes part of its transaction.
        key : str, optional
            A name for the task within its tag. At most one live task of a tag has a key.
        queue : str, optional
            The queue. By default the queue of the processor, or of the setting `queues`.
        priority : int, optional
            0 to 9; tasks with a higher priority run first.
        id : int, optional
            An id from `new_id`. Scheduling again with the same id does not add a task.
        retries : RetrySchedule, str or int, optional
            A retry schedule, text such as `"15s 3m"`, or a number of retries. By default the
            retry schedule of the processor.
        max_late : float, str or timedelta, optional
            The task is CANCELLED instead of run if a worker gets to it later than this after its
            due time. By default the value of the processor.
        limit_key : str, optional
            The customer, host or other entity that limits per key count. By default the value
            that the processor computes.
        meta : dict, optional
            A few pairs of strings, such as `{"tenant": "acme"}`, for filters, processors
            (`task.meta`) and events.
        body_version : int, optional
            The version of the body. By default the `body_version` of the processor, or 1.
        jitter : float, str or timedelta, optional
            The task is due up to this time after `delay`, so that many tasks do not become due
            together. Times are uniformly distributed. The same id or key gets the same time again.

        Returns
        -------
        DelayedTask
            The task as it is stored.

        Raises
        ------
        InvalidInputError
            If an argument is wrong. `error.argument` is its name.
        DuplicateTaskError
            If a live task has the key and `on_conflict` is `"reject"`.
        StoreUnavailableError
            If the database cannot be reached. Nothing was written.
        OutcomeUnknownError
            If the connection broke before the answer came. Schedule again with `error.id`.
        SessionUnusableError
            If the transaction of `session` cannot be used.

        Examples
        --------
        >>> delays.schedule_delay("order.close", {"order": 7}, "30m", key="7")
        >>> delays.schedule_delay("order.close", {"order": 7}, at=datetime(2031, 1, 1, tzinfo=UTC))
        """
        new = new_task(tag, body, delay, at, options)
        w = self._runtime
        transaction = w.transactions.of_new(session, "aschedule_delay")
        return w.producer.schedule(new, on_conflict, transaction)

    aschedule_delay = twin(schedule_delay)

    def schedule_many(
        self,
        tasks: Iterable[NewTask | tuple[str, Any, Delay | datetime]],
        *,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        on_batch: Callable[[Sequence[DelayedTask]], None] | None = None,
    ) -> int:
        """Schedule many tasks in batches of a few thousand.

        Parameters
        ----------
        tasks
            `NewTask` objects, or tuples of tag, body and a delay or an instant. A generator is
            read batch by batch, so memory use does not grow.
        on_conflict
            See `schedule_delay`.
        session
            See `schedule_delay`. Without it, each batch is one transaction.
        on_batch
            Is called with the tasks of each batch after the batch was written.

        Returns
        -------
        int
            The number of new tasks.

        Raises
        ------
        DelayTaskError
            The errors of `schedule_delay`. Batches before the failed batch stay written.

        Examples
        --------
        >>> delays.schedule_many(("mail.send", {"to": user}, 60) for user in users)
        10000
        """
        w, new = self._runtime, map(new_task_of, tasks)
        return w.producer.schedule_many(new, on_conflict, w.transactions.of(session), on_batch)

    aschedule_many = twin(schedule_many)

    @property
    def callbacks(self) -> CallbackCalls:
        """Schedule HTTP callbacks, and messages to queues. See `CallbackCalls`.

        Examples
        --------
        >>> delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60)
        """
        # Imported here: a process without callbacks does not need it.
        from delaytasks.callbacks.sending import CallbackCalls

        return CallbackCalls(self)

    def new_id(self) -> int:
        """Return an unused id, to schedule a task whose id is known in advance.

        Returns
        -------
        int
            The id.

        Examples
        --------
        >>> id = delays.new_id()
        >>> delays.schedule_delay("order.close", {"order": 7}, 1800, id=id)
        """
        return self._runtime.new_id()

    # -- Celery tasks -----------------------------------------------------------------------------

    def apply_async(
        self,
        /,
        signature: Any,
        args: Any = None,
        kwargs: Any = None,
        *,
        session: Any = None,
        **options: Any,
    ) -> Any:
        """Call a Celery task whose message waits as a row until it is due.

        This needs no setting. Without `countdown` and `eta` the task is due now, and its message
        is published after the commit of `session`.

        Parameters
        ----------
        signature
            A Celery task, a signature, or a canvas such as a chain or a group.
        args, kwargs
            See Celery's `apply_async`.
        session
            A SQLAlchemy Session or Connection. The row becomes part of its transaction.
        **options
            The options of Celery's `apply_async`, such as `countdown`, `eta` and `queue`.

        Returns
        -------
        celery.result.AsyncResult
            The result that Celery's `apply_async` returns.

        Raises
        ------
        DelayTaskError
            The errors of `schedule_delay`.

        Examples
        --------
        >>> delays.apply_async(remind.s(order.id), countdown=3600, session=session)
        """
        w = self._runtime
        # Without a session of its own, the call takes part in that of an outer `transaction`.
        joined = nullcontext() if session is None else w.transactions.using(session)
        with forced(w.celery), joined:
            return signature.apply_async(args, kwargs, **options)

    aapply_async = twin(apply_async)

    def transaction(self, session: Any) -> AbstractContextManager[None]:
        """Let calls inside a block take part in the transaction of `session`.

        This concerns calls of this object without `session=`, and Celery tasks that are called
        with a delay and become rows.

        Parameters
        ----------
        session
            A SQLAlchemy Session or Connection.

        Returns
        -------
        contextlib.AbstractContextManager
            The block of a `with` statement.

        Examples
        --------
        >>> with Session.begin() as session, delays.transaction(session):
        ...     session.add(order)
        ...     remind.apply_async((order.id,), countdown=3600)
        """
        return self._runtime.transactions.using(session)

    # -- change one task --------------------------------------------------------------------------

    def cancel(
        self,
        task: TaskName | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        version: int | None = None,
        running: bool = False,
        session: Any = None,
    ) -> CancelResult:
        """Cancel a task that waits, and with `running` one that runs.

        Parameters
        ----------
        task
            The id, or a task that was read. Alternatively give `tag` and `key`.
        tag, key
            The tag and key of a live task.
        version
            Cancel the task only if it still has this version.
        running
            Ask a running task to stop: within about a second its `is_cancelled` is true, and its
            `check_lease` raises `TaskCancelledError`. It is then CANCELLED, unless it succeeds.
        session
            A SQLAlchemy Session or Connection whose transaction the change becomes part of.

        Returns
        -------
        CancelResult
            True if this call cancelled the task. The task then never starts; with `session`, from
            the commit on. False if there is no such task, or it runs, has ended or was cancelled
            before. `result.reason` and `result.status` tell which. `result.is_requested` is True
            if a running task was asked to stop.

        Raises
        ------
        StaleVersionError
            If the task has another version than `version`.

        Examples
        --------
        >>> cancelled = delays.cancel(tag="order.close", key="7")
        >>> if not cancelled:
        ...     return f"too late to pay: {cancelled.reason}"
        """
        return cancel_task(self._runtime, task, tag, key, version, running, session)

    acancel = twin(cancel)

    def reschedule(
        self,
        task: TaskName | None = None,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        tag: str | None = None,
        key: str | None = None,
        version: int | None = None,
        session: Any = None,
    ) -> DelayedTask:
        """Give a task that waits another due time.

        Parameters
        ----------
        task, tag, key, version, session
            See `cancel`.
        delay
            Seconds from now, text such as `"30m"`, or a timedelta.
        at
            An aware datetime, instead of `delay`.

        Returns
        -------
        DelayedTask
            The task with its new due time.

        Raises
        ------
        TaskNotFoundError
            If there is no such task.
        TaskStateError
            If the task does not wait.
        StaleVersionError
            If the task has another version than `version`.

        Examples
        --------
        >>> delays.reschedule(tag="order.close", key="7", delay=3600)
        """
        runtime = self._runtime
        with named_task(runtime, task, tag, key, session) as (id, transaction, on):
            due = runtime.producer.due_of(delay, at)
            moved = runtime.store.tasks.reschedule(id, due, version, on)
        runtime.events.emit("task.rescheduled", **moved.event_fields)
        runtime.producer.arm_after_commit([moved], transaction)
        return moved

    areschedule = twin(reschedule)

    def touch(
        self,
        task: TaskName | Iterable[TaskName] | None = None,
        delay: Delay | None = None,
        *,
        tag: str | None = None,
        key: str | Iterable[str] | None = None,
        session: Any = None,
    ) -> TouchResult:
        """Postpone one timeout or many: a task is due `delay` from now, unless it is due later.

        No message is sent, and a few thousand rows are updated in one statement, so `touch` suits
        frequent heartbeats.

        Parameters
        ----------
        task
            An id or a task that was read, or several. Alternatively give `tag` and `key`.
        delay
            Seconds, text such as `"30m"`, or a timedelta.
        tag, key
            A tag, and the key of one of its tasks or several keys.
        session
            See `cancel`.

        Returns
        -------
        TouchResult
            True if the tasks wait. `result.gone` has the ids, or the keys, of those that no longer
            wait or do not exist.

        Raises
        ------
        TaskNotFoundError
            If one task is named, and there is no such task.

        Examples
        --------
        >>> if not delays.touch(tag="device.offline", key="d-17", delay=90):
        ...     print("too late")
        >>> delays.touch(tag="device.offline", key=["d-17", "d-18"], delay=90).gone
        ['d-18']
        """
        if (task is None) == (key is None) or (tag is None) != (key is None):
            raise InvalidInputError("name the tasks by their ids, or by tag= and key=", "task")
        runtime = self._runtime
        tasks, names = runtime.store.tasks, cast(Any, task if key is None else key)
        with runtime.transactions.guard(session) as transaction:
            due, on = runtime.producer.due_of(delay), connection_of(transaction)
            if tag is not None:
                tag = check_tag(tag)
                if not is_several(names):  # no other statement looks the key up
                    waits = tasks.touch_key(tag, check_key(names), due, on)
                    return TouchResult.of([names], {names} if waits else set())
                keys = [check_key(each) for each in names]
                ids_of_keys = tasks.ids_of_keys(tag, keys, on, is_to_move=True)
                touched = tasks.touch_many(ids_of_keys.values(), due, on)
                touched_keys = {name for name, id in ids_of_keys.items() if id in touched}
                return TouchResult.of(keys, touched_keys)
            if not is_several(names):
                id = id_of(names)
                return TouchResult.of([id], {id} if tasks.touch(id, due, on) else set())
            ids = [id_of(each) for each in names]
            return TouchResult.of(ids, tasks.touch_many(ids, due, on))

    atouch = twin(touch)

    def rerun(
        self,
        task: TaskName | None = None,
        delay: Delay = 0,
        *,
        version: int | None = None,
        session: Any = None,
    ) -> DelayedTask:
        """Run a FAILED or CANCELLED task again. Its runs are counted from 0.

        Parameters
        ----------
        task, version, session
            See `cancel`.
        delay
            Seconds from now, text such as `"30m"`, or a timedelta.

        Returns
        -------
        DelayedTask
            The task, which waits again.

        Raises
        ------
        TaskNotFoundError
            If there is no such task.
        TaskStateError
            If the task is neither FAILED nor CANCELLED.
        DuplicateTaskError
            If another live task has the key of the task.
        StaleVersionError
            If the task has another version than `version`.

        Examples
        --------
        >>> delays.rerun(task.id, delay=60)
        """
        runtime = self._runtime
        with named_task(runtime, task, None, None, session) as (id, transaction, on):
            due = runtime.producer.due_of(delay)
            moved = runtime.store.tasks.rerun(id, due, version, on)
        runtime.events.emit("task.rerun", **moved.event_fields)
        runtime.producer.arm_after_commit([moved], transaction)
        return moved

    arerun = twin(rerun)

    # -- look up ----------------------------------------------------------------------------------

    def get(
        self,
        task: TaskName | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        attempts: bool = False,
        session: Any = None,
    ) -> DelayedTask:
        """Read a task.

        Parameters
        ----------
        task, tag, key
            See `cancel`.
        attempts
            Read the failed attempts as well, as `task.attempts`.
        session
            A SQLAlchemy Session or Connection that reads the row.

        Returns
        -------
        DelayedTask
            The task as it is now.

        Raises
        ------
        TaskNotFoundError
            If there is no such task.

        Examples
        --------
        >>> delays.get(tag="order.close", key="7").status
        <Status.NOT_COMPLETE: 0>
        >>> [attempt.error for attempt in delays.get(task, attempts=True).attempts]
        ['the partner is busy']
        """
        tasks = self._runtime.store.tasks
        named = named_task(self._runtime, task, tag, key, session, is_to_move=False)
        with named as (id, _, on):
            found = tasks.read(id, on)
            return replace(found, attempts=tuple(tasks.attempts(id, on))) if attempts else found

    aget = twin(get)

    def result(
        self,
        task: TaskName | None = None,
        timeout: Delay | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
    ) -> Any:
        """Wait until a task has ended, and return what its processor returned.

        The row is read in a transaction of its own, in steps of up to half a second. Commit the
        task before.

        Parameters
        ----------
        task, tag, key
            See `cancel`.
        timeout
            The longest time to wait: seconds, text such as `"30s"`, or a timedelta. None means no
            limit.

        Returns
        -------
        object
            The result of a task that is DONE. None unless its processor keeps results.

        Raises
        ------
        TaskFailedError, TaskCancelledError
            If the task is FAILED or CANCELLED. The message is its error, and `error.id` its id.
        WaitTimeoutError
            If the task has not ended in time.
        TaskNotFoundError
            If there is no such task, or it was purged.

        Examples
        --------
        >>> delays.result(task, "30s")
        {'receipt': 7}
        """
        runtime = self._runtime
        found = read_task(runtime, task, tag, key)
        for pause_s in pauses(timeout):
            if found.is_finished:
                break
            time.sleep(pause_s)
            found = runtime.store.tasks.read(found.id)
        return result_of(found)

    def find(
        self,
        *,
        cursor: str | None = None,
        limit: int = 100,
        newest_first: bool = False,
        session: Any = None,
        **filters: Unpack[Filters],
    ) -> Page:
        """Read a page of the tasks that match all given conditions, in the order of due times.

        Parameters
        ----------
        tag, key, key_prefix, queue : str, optional
            Filters. A task must match all that are given. A finished task keeps its key.
        ids : int, str or several, optional
            Up to 1,000 ids, of which the task has one.
        meta : dict, optional
            Pairs that a task has, perhaps among others.
        status : Status, str or several, optional
            One status, or a list of statuses of which the task has one.
        error : str, optional
            A pattern that the text of the last error matches, such as `"*timeout*"`.
        since, until, created_since, created_until, updated_until : datetime, optional
            Filters of the due time (`expected_time`), the time of the first call and the last
            change: at or after `since`, before `until`.
        cursor
            The `cursor` of the page before, to read the next page.
        limit
            The most tasks of a page, 1 to 1,000.
        newest_first
            Reverse the order.
        session
            See `get`.

        Returns
        -------
        Page
            The tasks; `page.cursor` is None on the last page.

        Raises
        ------
        InvalidInputError
            If a filter, the cursor or the limit is wrong.

        Examples
        --------
        >>> for task in delays.find(tag="order.close", status=["FAILED", "CANCELLED"]):
        ...     print(task.id, task.error)
        """
        return find_tasks(self._runtime, filters, cursor, limit, newest_first, session)

    afind = twin(find)

    @property
    def bulk(self) -> Bulk:
        """Cancel, reschedule or rerun all tasks that match a filter. See `Bulk`.

        Examples
        --------
        >>> delays.bulk.cancel(tag="mail.send", key_prefix="eu-").changed
        1200
        """
        return Bulk(self)

    @property
    def policies(self) -> PolicyCalls:
        """Pause and limit the tasks of a tag or a queue. See `PolicyCalls`.

        Examples
        --------
        >>> delays.policies.pause(tag="mail.send")
        """
        return PolicyCalls(self)

    # -- recurring schedules ----------------------------------------------------------------------

    @property
    def recurring(self) -> Recurring:
        """The recurring schedules: a decorator, and an object with methods. See `Recurring`.

        Examples
        --------
        >>> delays.recurring.set("nightly", "report.send", cron="0 2 * * *", tz="Europe/Berlin")
        """
        # Imported here: most processes have no recurring schedules.
        from delaytasks.recurring.recurring import Recurring

        return Recurring(self)

    # -- statistics -------------------------------------------------------------------------------

    @property
    def statistics(self) -> Statistics:
        """What workers have run: series, totals, groups of failures. See `Statistics`.

        Examples
        --------
        >>> delays.statistics.totals(since="1d")["mail.send"].failed
        """
        # Imported here: most processes read no statistics.
        from delaytasks.operate.statistics import Statistics

        return Statistics(self)

    # -- forecast ---------------------------------------------------------------------------------

    def forecast(self, days: float = 7, *, processes: int | None = None) -> Forecast:
        """Compute what becomes due in each hour, and whether the processes of workers suffice.

        Up to five million tasks that wait are counted, those that are due first. Occurrences of
        recurring schedules that have no tasks yet are added. Each task needs the mean duration
        that workers have measured for its tag in the last two days.

        Parameters
        ----------
        days
            The time from now on, in days, at most 92.
        processes
            The number of processes that run tasks. By default those of the workers that are alive,
            or else Celery's setting `worker_concurrency`.

        Returns
        -------
        Forecast
            The hours and tags.

        Raises
        ------
        InvalidInputError
            If an argument is wrong.
        StoreUnavailableError
            If the database cannot be reached.

        Examples
        --------
        >>> forecast = delays.forecast()
        >>> forecast.first_full.due, forecast.first_full.utilization
        (240000, 2.5)
        """
        # Imported here: most processes make no forecasts.
        from delaytasks.operate.forecast import make_forecast

        return make_forecast(self._runtime, days, processes)

    aforecast = twin(forecast)

    # -- run --------------------------------------------------------------------------------------

    @overload
    def processor(self, tag: str, **options: Unpack[CommonOptions]) -> Decorator: ...

    @overload
    def processor(
        self, tag: str, *, schema: type[Any], **options: Unpack[CommonOptions]
    ) -> Decorator: ...

    # The bodies of a batch, and those that a function converts, have any type.
    @overload
    def processor(
        self, tag: str, **options: Unpack[ProcessorOptions]
    ) -> Callable[[Callable[P, Returned]], Processor[Any, P, Returned]]: ...

    def processor(self, tag: str, **options: Unpack[ProcessorOptions]) -> Any:
        """Register the decorated function as the processor of a tag.

        Parameters
        ----------
        tag
            The tag. A tag has one processor: `f(body)`, or `f(body, task)`.
        queue : str, optional
            The queue of tasks that are scheduled without one.
        retries : RetrySchedule, str, int or dict, optional
            A retry schedule such as `"15s 3m 10m"`, a number of retries, or a dict with one of
            these for each exception type. By default a task that fails is FAILED.
        max_late : float, str or timedelta, optional
            A task that a worker gets to later than this after its due time is CANCELLED.
        keep_result : bool, optional
            Store what the function returns, as JSON.
        batch : int, optional
            Call the function with up to this number of tasks: `f(tasks)`, or `f(bodies, tasks)`.
        in_flight : int, optional
            The number of calls that run concurrently in each process; 100 for `async def`.
        schema : callable, optional
            A dataclass, a pydantic model or a function. Its result for the body is the argument of
            the function; bodies that it refuses are not scheduled, and FAILED if they were stored.
        body_version : int, optional
            The newest version of the bodies that the function takes; `task.body_version` is that of
            a task. A task with a newer body waits for a worker with newer code.
        aliases : list or tuple of str, optional
            Former tags of the function, whose rows it runs as well.
        limit_key : callable, optional
            A function that returns the limit key of a body, for `policies.set`.
        soft_time_limit, time_limit : float, str or timedelta, optional
            A longer run gets Celery's `SoftTimeLimitExceeded`, or is killed. Only with the prefork
            pool.

        Returns
        -------
        callable
            A decorator that makes a `Processor` of the function. It can be called as before.

        Raises
        ------
        ConfigError
            If the tag has another processor.
        TypeError, ValueError
            If an option is unknown or wrong, or the function takes other arguments.

        Examples
        --------
        >>> @delays.processor("order.close", retries="15s 3m 10m")
        ... def close_order(body): ...
        >>> close_order.schedule({"order": 7}, "30m")
        """
        tags = tags_of(tag, options.pop("aliases", None) or ())
        registers = [self._registry.processor(name, **options) for name in tags]

        def decorate(function: Callable[..., Any]) -> Processor[Any, ..., Any]:
            if isinstance(function, Processor):  # it is registered for another tag, too
                function = function.function
            for register in registers:
                register(function)
            return Processor(self, tag, function)

        return decorate

    def check(self) -> list[Finding]:
        """Find waiting tasks that this code cannot run, before it is deployed.

        Returns
        -------
        list of Finding
            The tags without a processor, and bodies that the schema of a tag refuses.

        Examples
        --------
        >>> for finding in delays.check():
        ...     print(finding.tag, finding.problem)
        """
        from delaytasks.operate.checks import check_waiting

        return [*check_waiting(self._runtime)]

    acheck = twin(check)

    @property
    def events(self) -> Events:
        """The events of this process. `events.subscribe(f)` calls `f(name, fields)` for each."""
        return self._events

    @property
    def settings(self) -> Settings:
        """The settings, read from the arguments, the Celery configuration and the environment."""
        return self._runtime.settings

    def close(self) -> None:
        """Arm what waits to be armed, and close all connections. A later call opens them again.

        Examples
        --------
        >>> delays.close()
        """
        if self._made is not None:
            self._made.close()

    async def aclose(self) -> None:
        """Arm what waits to be armed, and close all connections.

        This is the asynchronous twin of `close`. It waits for the calls of other coroutines.

        Examples
        --------
        >>> await delays.aclose()
        """
        await asyncio.to_thread(self.close)

    async def aresult(
        self,
        task: TaskName | None = None,
        timeout: Delay | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
    ) -> Any:
        """Wait until a task has ended, and return what its processor returned.

        This is the asynchronous twin of `result`. Many coroutines can wait at the same time, since
        none of them occupies a thread.

        Examples
        --------
        >>> await delays.aresult(task, "30s")
        {'receipt': 7}
        """
        calls, runtime = await self._async_calls(), self._runtime
        # As for `result`, each read is a transaction of its own, whatever `transaction` says.
        found = await calls.run(read_task, runtime, task, tag, key)
        for pause_s in pauses(timeout):
            if found.is_finished:
                break
            await asyncio.sleep(pause_s)
            found = await calls.run(runtime.store.tasks.read, found.id)
        return result_of(found)

    # -- asyncio ----------------------------------------------------------------------------------

    async def _run_async(self, method: Any, /, *arguments: Any, **options: Any) -> Any:
        calls = await self._async_calls()
        return await calls.run(method, *arguments, **options)

    async def _async_calls(self) -> AsyncCalls:
        if not self._is_made:
            await asyncio.to_thread(lambda: self._runtime)  # imports modules and reads files
        return self._runtime.async_calls

    # -- parts ------------------------------------------------------------------------------------

    @property
    def _is_made(self) -> bool:
        return self._made is not None

    @property
    def _runtime(self) -> Runtime:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    made = self._make_runtime()
                    made.check()
                    self._made = made
        return self._made

    def _make_runtime(self, **settings: Any) -> Runtime:
        """Return the objects behind this instance, with these settings too."""
        # Imported here: a process that only registers processors does not need it.
        from delaytasks.runtime import Runtime

        return Runtime(self, **settings)

    @cached_property
    def _processes(self) -> Processes:
        # Imported here: most processes run no tasks.
        from delaytasks.worker.processes import Processes

        return Processes(lambda: self._runtime)

    def _exchange_runtime(self, runtime: Runtime | None, is_in_test: bool) -> Runtime | None:
        """Use these objects from now on, and return those before, which are not closed."""
        with self._lock:
            self._is_in_test = is_in_test
            before, self._made = self._made, runtime
            return before

    def _renew_runtime(self, **settings: Any) -> None:
        with self._lock:
            self.close()
            self._made = None
            self._arguments.update(settings)

    def _call_back(self, callback: Callback, task: DelayedTask) -> Outcome:
        return self._runtime.http_callbacks(callback, task)

    def _send_message(self, message: Message, task: DelayedTask) -> Outcome:
        return self._runtime.queue_callbacks(message, task)

    def _publish_tasks(
        self, bodies: Sequence[Any], tasks: Sequence[DelayedTask]
    ) -> Sequence[Outcome]:
        return self._runtime.celery_tasks.publish(bodies, tasks)

    # The integrations with web frameworks override these.

    def _database_now(self, insists: bool) -> datetime:
        """Read the time of the database; `insists` repeats a failed statement."""
        return self._runtime.store.tasks.now(insists)

    def _ambient_transaction(self) -> Transaction | None:
        """Return the transaction of a call without `session=`."""
        return None

    def _processor_contexts(self) -> Sequence[ProcessorContext]:
        """Return the contexts that surround each call of a processor, the outermost first."""
        return ()

    def _test_connections(self) -> ConnectionSource | None:
        """Return the framework's own connections for a test, whose transactions it rolls back."""
        return None

    def _in_framework(self, call: Callable[[], Any]) -> Awaitable[Any] | None:
        """Run the call of a coroutine as the framework requires; None means in any thread."""
        return None
