"""`delays.recurring`: declares, stores, changes and reads recurring schedules.

This module is longer than 300 lines only because every method has a complete docstring.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from celery.local import PromiseProxy

from delaytasks.core.inputs import check_schedule_name
from delaytasks.processors.registry import Registry
from delaytasks.recurrence.declarations import follow
from delaytasks.recurrence.definition import Definition, RecurringOptions
from delaytasks.recurrence.targets import RecurringTarget, target_of
from delaytasks.twins import twin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.core.task import DelayTask
    from delaytasks.recurrence.schedule import RecurringSchedule
    from delaytasks.runtime import Runtime

F = TypeVar("F", bound=Callable[..., Any])


class Recurring:
    """The recurring schedules of a `DelayTasks`, as `delays.recurring`.

    The object itself is a decorator for schedules that code declares. Its methods are for schedules
    that a program makes while it runs, and for operators. Each method has an asynchronous twin for
    coroutines, such as `aset` for `set`.

    Examples
    --------
    >>> @delays.recurring("0 9 * * mon-fri", tz="Europe/Berlin")
    ... @delays.processor("report.send")
    ... def send_report(body): ...
    >>> delays.recurring.set("invoices-acme", "invoice.all", {"tenant": "acme"}, every="1h")
    """

    def __init__(
        self,
        registry: Registry,
        get_runtime: Callable[[], Runtime],
        run_async: Callable[..., Awaitable[Any]],
    ) -> None:
        self._registry = registry
        self._get_runtime = get_runtime
        self._run_async = run_async

    # -- in code ----------------------------------------------------------------------------------

    def __call__(
        self,
        cron: Any = None,
        *,
        name: str | None = None,
        body: Any = None,
        **options: Unpack[RecurringOptions],
    ) -> Callable[[F], F]:
        """Declare that tasks of the decorated processor, or the decorated Celery task, recur.

        The workers store their declarations. A declaration that is removed from the code of a
        processor is removed from the table, and a changed one replaces the stored one. A pause
        stays.

        Parameters
        ----------
        cron
            A cron expression, or an object of Celery: `crontab` or `schedule`. Give
            either `cron` or `every`.
        name
            The name of the schedule; by default the tag, or the name of the Celery task.
        body
            The body of each task, as in `set`.
        **options
            The options of `set`.

        Returns
        -------
        callable
            A decorator that returns the object unchanged. It belongs above the decorator of the
            processor or of the Celery task.

        Raises
        ------
        TypeError
            If the decorated object is no processor and no Celery task, or an option is unknown.
        InvalidTimingError, InvalidScheduleError
            See `set`.

        Examples
        --------
        >>> @delays.recurring(every="5m")
        ... @delays.processor("feeds.read")
        ... def read_feeds(body): ...
        """

        def declare(function: F) -> F:
            # An error is raised where the code has the wrong option or the wrong object.
            Definition("", "", None, cron, options).recurrence("UTC")
            make = partial(self._definition, function, name, body, cron, options)
            if isinstance(function, PromiseProxy) and not function.__evaluated__():
                # A Celery task of an app that is not finalized yet: its name is unknown.
                self._registry.schedules.append(make)
                return function
            made = make()
            self._registry.schedules.append(lambda: made)
            return function

        return declare

    def follow_code(self) -> None:
        """Store the declarations of this process now, as workers do at their start.

        For tests, and for scripts that run after a deployment.

        Examples
        --------
        >>> delays.recurring.follow_code()
        """
        follow(self._get_runtime())

    afollow_code = twin(follow_code)

    # -- define -----------------------------------------------------------------------------------

    def set(
        self,
        name: str,
        tag: Any,
        body: Any = None,
        *,
        cron: Any = None,
        session: Any = None,
        actor: str | None = None,
        **options: Unpack[RecurringOptions],
    ) -> RecurringSchedule:
        """Store a recurring schedule, or replace the one of this name.

        If the stored schedule is the same, nothing is changed. If it differs, the tasks that wait
        for its later occurrences are cancelled. A pause stays.

        Parameters
        ----------
        name
            The name of the schedule, at most 166 characters.
        tag
            The tag of each task, its processor, or a Celery task.
        body
            The body of each task. For a Celery task: a dict with `args`, `kwargs` and `options` of
            `apply_async`, or None.
        cron
            A cron expression of five fields, or of six with seconds first, or Celery's `crontab`,
            or `schedule`. Give either `cron` or `every`.
        session
            A SQLAlchemy Session or Connection. The schedule becomes part of its transaction.
        actor
            The name of the person or program. By default the user of this process.
        every : float, str or timedelta, optional
            An interval of whole seconds, such as `"5m"`.
        tz : str, optional
            The time zone of the cron expression. By default Celery's setting `timezone`, or UTC.
        start : datetime, optional
            The first occurrence of an interval, which otherwise begins now, or the earliest
            occurrence of a cron expression.
        jitter : float, str or timedelta, optional
            Each task is due up to this time after its occurrence, so that many do not start
            together.
        missed : str, optional
            The rule for occurrences that passed while no sweep took place: `"latest"` runs the last
            one, `"all"` runs the last `most_missed`, `"skip"` runs none that passed more
            than a minute ago.
        most_missed : int, optional
            The bound of `missed="all"`; 100 by default, at most 1,000.
        overlap : str, optional
            `"skip"` makes no task for an occurrence while the task before it waits or runs.
            `"allow"` is the default.
        queue, priority, retries, expires, concurrency_key, meta, body_version : optional
            See `DelayTasks.schedule_delay`. `expires` counts from the due time of each task.

        Returns
        -------
        RecurringSchedule
            The schedule as it is stored.

        Raises
        ------
        InvalidTimingError
            If the cron expression, the interval or the time zone is wrong.
        InvalidScheduleError
            If another option is wrong, or code declares a schedule of this name.
        InvalidInputError, StoreError
            See `DelayTasks.schedule_delay`.

        Examples
        --------
        >>> delays.recurring.set(
        ...     "report-acme", "report.send", {"tenant": "acme"}, cron="0 9 * * *", tz="Asia/Tokyo"
        ... )
        """
        operations = self._get_runtime().recurring
        new = operations.checked(self._definition(tag, name, body, cron, options))
        return operations.put(new, session, actor)

    aset = twin(set)

    def remove(
        self, name: str, *, session: Any = None, actor: str | None = None
    ) -> RecurringSchedule:
        """Delete a schedule, and cancel its tasks that wait for later occurrences.

        A worker that declares the schedule adds it again. Pause such a schedule instead, or remove
        the declaration.

        Parameters
        ----------
        name
            The name.
        session, actor
            See `set`.

        Returns
        -------
        RecurringSchedule
            The schedule as it was.

        Raises
        ------
        RecurringNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.remove("report-acme")
        """
        return self._get_runtime().recurring.remove(name, session, actor)

    aremove = twin(remove)

    # -- pause and run ----------------------------------------------------------------------------

    def pause(
        self, name: str, *, session: Any = None, actor: str | None = None
    ) -> RecurringSchedule:
        """Make no more tasks of a schedule, and cancel those that wait for later occurrences.

        Parameters
        ----------
        name, session, actor
            See `remove`.

        Returns
        -------
        RecurringSchedule
            The paused schedule.

        Raises
        ------
        RecurringNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.pause("report-acme").is_paused
        True
        """
        return self._get_runtime().recurring.pause(name, session, actor)

    apause = twin(pause)

    def resume(
        self, name: str, *, session: Any = None, actor: str | None = None
    ) -> RecurringSchedule:
        """End a pause. The schedule continues with its next occurrence.

        Parameters
        ----------
        name, session, actor
            See `remove`.

        Returns
        -------
        RecurringSchedule
            The schedule.

        Raises
        ------
        RecurringNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.resume("report-acme").next_at
        datetime.datetime(2026, 11, 25, 0, 0, tzinfo=datetime.timezone.utc)
        """
        return self._get_runtime().recurring.resume(name, session, actor)

    aresume = twin(resume)

    def run(self, name: str, *, session: Any = None) -> DelayTask:
        """Make one task of a schedule that is due now. Its occurrences stay as they are.

        A paused schedule can be run, too.

        Parameters
        ----------
        name, session
            See `remove`.

        Returns
        -------
        DelayTask
            The task.

        Raises
        ------
        RecurringNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.run("report-acme").key
        'report-acme@2026-11-24T20:15:00.123Z'
        """
        return self._get_runtime().recurring.run(name, session)

    arun = twin(run)

    # -- look up ----------------------------------------------------------------------------------

    def get(self, name: str) -> RecurringSchedule:
        """Read a schedule.

        Parameters
        ----------
        name
            The name.

        Returns
        -------
        RecurringSchedule
            The schedule.

        Raises
        ------
        RecurringNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.get("report-acme").tz
        'Asia/Tokyo'
        """
        return self._get_runtime().recurring.get(name)

    aget = twin(get)

    def list(
        self,
        *,
        tag: str | None = None,
        prefix: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[RecurringSchedule]:
        """Read schedules in the order of their names.

        Parameters
        ----------
        tag, prefix
            Read only schedules of this tag, or whose name begins like this.
        after
            Begin after this name: the last one of the page before.
        limit
            The most schedules to return, 1 to 1,000.

        Returns
        -------
        list of RecurringSchedule
            The schedules.

        Examples
        --------
        >>> [schedule.name for schedule in delays.recurring.list(tag="report.send")]
        ['report-acme', 'report-initech']
        """
        return self._get_runtime().recurring.list(tag, prefix, after, limit)

    alist = twin(list)

    def next(
        self, name: str, count: int = 5, *, after: datetime | None = None
    ) -> Sequence[datetime]:
        """Return the next occurrences of a schedule, in UTC, whether or not it is paused.

        Parameters
        ----------
        name
            The name.
        count
            The most occurrences to return.
        after
            An aware datetime; by default now.

        Returns
        -------
        sequence of datetime
            The occurrences, without jitter.

        Raises
        ------
        RecurringNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.next("report-acme", 1)
        [datetime.datetime(2026, 11, 25, 0, 0, tzinfo=datetime.timezone.utc)]
        """
        return self._get_runtime().recurring.next(name, count, after)

    anext = twin(next)

    # -- internals --------------------------------------------------------------------------------

    def _definition(
        self, target: Any, name: str | None, body: Any, cron: Any, options: RecurringOptions
    ) -> Definition:
        found = self._target_of(target, body)
        chosen = check_schedule_name(found.name if name is None else name)
        return Definition(chosen, found.tag, found.body, cron, options)

    def _target_of(self, target: Any, body: Any) -> RecurringTarget:
        found = target_of(target, body, self._registry)
        if found is None:
            raise TypeError(
                f"{getattr(target, '__qualname__', target)!s} is no processor and no Celery task: "
                "write @delays.recurring(...) above the decorator that makes it one"
            )
        return found
