"""`delays.recurring`: declares, stores, changes and reads recurring schedules.

Each worker compares the table with the schedules that its code declares, at its start and then
every `FOLLOW_S`. A worker that has the processor of a tag, or a Celery task, knows all declared
schedules of it. It therefore adds and changes them, and removes those that its code no longer
declares. A pause belongs to the operator and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from celery.local import PromiseProxy

from delaytasks.model.errors import (
    ConfigError,
    InvalidInputError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.model.inputs import actor_of, check_page_limit, check_schedule_name, check_tag
from delaytasks.model.task import CallerConnection, DelayedTask, NewTask
from delaytasks.recurring.creation import task_of
from delaytasks.recurring.definition import (
    DEFINED,
    Definition,
    RecurringOptions,
    RecurringSchedule,
    RecurringTarget,
    has_same_start,
    is_known,
    is_same_definition,
    started,
    target_of,
)
from delaytasks.twins import CallGroup, twin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.model.task import DelayedTask
    from delaytasks.recurring.definition import RecurringSchedule
    from delaytasks.runtime import Runtime

F = TypeVar("F", bound=Callable[..., Any])


class Recurring(CallGroup):
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
        InvalidInputError
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
                self._delays._registry.schedules.append(make)
                return function
            made = make()
            self._delays._registry.schedules.append(lambda: made)
            return function

        return declare

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
        queue, priority, retries, max_late, limit_key, meta, body_version : optional
            See `DelayTasks.schedule_delay`. `max_late` counts from the due time of each task.

        Returns
        -------
        RecurringSchedule
            The schedule as it is stored.

        Raises
        ------
        InvalidInputError
            If an option is wrong, or code declares a schedule of this name.
        StoreError
            See `DelayTasks.schedule_delay`.

        Examples
        --------
        >>> delays.recurring.set(
        ...     "report-acme", "report.send", {"tenant": "acme"}, cron="0 9 * * *", tz="Asia/Tokyo"
        ... )
        """
        runtime = self._runtime
        new = checked(runtime, self._definition(tag, name, body, cron, options))
        return put(runtime, new, session, actor)

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
        TaskNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.remove("report-acme")
        """
        return remove_schedule(self._runtime, name, session, actor)

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
        TaskNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.pause("report-acme").is_paused
        True
        """
        runtime = self._runtime

        def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
            if known.is_paused:
                return Change(known)
            cancelled = _cancel_waiting(runtime, on, known, now)
            changes = {"is_paused": True, "next_at": None}
            return Change(runtime.recurring_table.update(on, known, changes), "paused", cancelled)

        return _change_known(runtime, name, work, session, actor)

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
        TaskNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.resume("report-acme").next_at
        datetime.datetime(2026, 11, 25, 0, 0, tzinfo=datetime.timezone.utc)
        """
        runtime = self._runtime

        def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
            if not known.is_paused:
                return Change(known)
            changes = {"is_paused": False, "next_at": known.parsed().after(now)}
            return Change(runtime.recurring_table.update(on, known, changes), "resumed")

        return _change_known(runtime, name, work, session, actor)

    aresume = twin(resume)

    def schedule_now(self, name: str, *, session: Any = None) -> DelayedTask:
        """Make one task of a schedule that is due now. Its occurrences stay as they are.

        A paused schedule can have such a task, too.

        Parameters
        ----------
        name, session
            See `remove`.

        Returns
        -------
        DelayedTask
            The task.

        Raises
        ------
        TaskNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.schedule_now("report-acme").key
        'report-acme@2026-11-24T20:15:00.123Z'
        """
        runtime = self._runtime
        made: list[DelayedTask] = []

        def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
            at = now.replace(microsecond=now.microsecond // 1000 * 1000)
            task = task_of(known, at, at, runtime.new_id(), now)
            made[:] = [task]  # a transaction may be tried again
            table, cancelled = runtime.recurring_table, list[DelayedTask]()
            changes: dict[str, Any] = {"last_task_id": task.id}
            if known.overlap == "skip" and not known.is_paused:
                cancelled += _cancel_waiting(runtime, on, known, now)
                changes["next_at"] = known.parsed().after(now)
            table.write(on, made)
            return Change(table.update(on, known, changes), "run", cancelled)

        _change_known(runtime, name, work, session, None)
        runtime.events.emit("task.scheduled", id=made[0].id, tag=made[0].tag)
        runtime.producer.arm_after_commit(made, runtime.transactions.of(session))
        return made[0]

    aschedule_now = twin(schedule_now)

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
        TaskNotFoundError
            If there is no schedule of this name.

        Examples
        --------
        >>> delays.recurring.get("report-acme").tz
        'Asia/Tokyo'
        """
        runtime = self._runtime
        found = runtime.recurring_table.find(check_schedule_name(name))
        if found is None:
            raise TaskNotFoundError(
                f"there is no recurring schedule {name!r}; `delaytasks recurring list` shows all"
            )
        return found

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
        runtime = self._runtime
        check_page_limit(limit)
        return runtime.recurring_table.page(
            None if tag is None else check_tag(tag), prefix, after, limit
        )

    alist = twin(list)

    # -- internals --------------------------------------------------------------------------------

    def _definition(
        self, target: Any, name: str | None, body: Any, cron: Any, options: RecurringOptions
    ) -> Definition:
        found = self._target_of(target, body)
        chosen = check_schedule_name(found.name if name is None else name)
        return Definition(chosen, found.tag, found.body, cron, options)

    def _target_of(self, target: Any, body: Any) -> RecurringTarget:
        found = target_of(target, body, self._delays._registry)
        if found is None:
            raise TypeError(
                f"{getattr(target, '__qualname__', target)!s} is no processor and no Celery task: "
                "write @delays.recurring(...) above the decorator that makes it one"
            )
        return found


# -- the table -----------------------------------------------------------------------------------


class Change(NamedTuple):
    """A schedule after a change, and the tasks that were cancelled because of the change."""

    schedule: RecurringSchedule
    #: The kind of the change; empty if nothing was changed.
    action: str = ""
    cancelled: Sequence[DelayedTask] = ()


#: Changes a locked schedule on a connection.
ChangeKnown = Callable[[Any, RecurringSchedule, datetime], Change]


def default_tz(runtime: Runtime) -> str:
    """Return the time zone of cron expressions without one."""
    return str(runtime.celery.conf.timezone or "UTC")


def checked(runtime: Runtime, definition: Definition) -> RecurringSchedule:
    """Return the schedule of a definition; write nothing."""

    def build(new: NewTask) -> DelayedTask:
        [task] = runtime.producer.build([new], "reject")
        return task

    return definition.checked(build, default_tz(runtime))


def comparison(runtime: Runtime, new: RecurringSchedule) -> str:
    """Return whether `put` would have "added" or "changed" the schedule, or "unchanged"."""
    known = runtime.recurring_table.find(new.name)
    if known is None:
        return "added"
    return "unchanged" if is_same_definition(known, new) else "changed"


def put(
    runtime: Runtime,
    new: RecurringSchedule,
    session: Any = None,
    actor: str | None = None,
    is_declared: bool = False,
    is_paused: bool = False,
) -> RecurringSchedule:
    """Store a schedule. Another definition replaces the stored one; the same changes nothing.

    A pause remains; `is_paused` is for a schedule that is new. Tasks of the replaced definition
    that wait for later occurrences are cancelled.
    """
    table, who = runtime.recurring_table, actor_of(actor)

    def work(on: Any, now: datetime) -> Change:
        known = table.find(new.name, on, locks=True)
        if known is None:
            id = runtime.new_id()
            made = _first(replace(new, is_paused=is_paused), id, now, who, is_declared)
            if table.insert(on, made):
                return Change(made, "added")
            known = table.lock(on, new.name)
        if known.is_declared and not is_declared:
            raise InvalidInputError(
                f"the recurring schedule {known.name!r} is declared in code: change it there, "
                "or choose another name",
                "name",
            )
        if is_same_definition(known, new) and known.is_declared == is_declared:
            return Change(known)
        cancelled = _cancel_waiting(runtime, on, known, now)
        changes = _changes(known, new, now) | {
            "is_declared": is_declared,
            "update_time": now,
            "updated_by": who,
        }
        if not known.is_paused:
            changes["next_at"] = _next_at(known, changes, now)
        return Change(table.update(on, known, changes), "changed", cancelled)

    return _change(runtime, work, session, who)


def remove_schedule(
    runtime: Runtime, name: str, session: Any, actor: str | None
) -> RecurringSchedule:
    """Delete the schedule, and cancel the waiting tasks of later occurrences."""

    def work(on: Any, known: RecurringSchedule, now: datetime) -> Change:
        cancelled = _cancel_waiting(runtime, on, known, now)
        runtime.recurring_table.delete(on, known)
        return Change(known, "removed", cancelled)

    return _change_known(runtime, name, work, session, actor)


def _change_known(
    runtime: Runtime, name: str, work: ChangeKnown, session: Any, actor: str | None
) -> RecurringSchedule:
    check_schedule_name(name)

    def change(on: Any, now: datetime) -> Change:
        return work(on, runtime.recurring_table.lock(on, name), now)

    return _change(runtime, change, session, actor_of(actor))


def _change(
    runtime: Runtime, work: Callable[[Any, datetime], Change], session: Any, who: str
) -> RecurringSchedule:
    """Run `work` in the caller's transaction, or in one of our own."""
    transaction, now = runtime.transactions.of(session), runtime.clock.certain_now()
    with transaction.guard() if transaction is not None else nullcontext() as on:
        change = runtime.recurring_table.transaction(lambda c: work(c, now), on)
    if change.action:
        name = change.schedule.name
        runtime.events.emit("recurring.changed", schedule=name, change=change.action, actor=who)
    for task in change.cancelled:
        runtime.events.emit("task.cancelled", id=task.id, tag=task.tag)
        runtime.producer.disarm_after_commit(task, transaction)
    return change.schedule


def _cancel_waiting(
    runtime: Runtime, on: CallerConnection, known: RecurringSchedule, now: datetime
) -> Sequence[DelayedTask]:
    """Cancel the tasks that sweeps have made ahead and that wait for their due times."""
    if known.last_at is None:
        return []
    try:
        keys = [known.key_of(at) for at in known.between(now, known.last_at)]
    except InvalidInputError:
        return []  # another program wrote the timing, and no sweep made tasks of it
    cancelled: list[DelayedTask] = []
    for id in runtime.recurring_table.ids_of_keys(on, known.tag, keys):
        try:
            task = runtime.store.tasks.cancel(id, on=on)
        except TaskStateError:
            continue  # the task runs
        cancelled += [] if task is None else [task]
    return cancelled


def _first(
    new: RecurringSchedule, id: int, now: datetime, who: str, is_declared: bool
) -> RecurringSchedule:
    """Return a new schedule as it is stored."""
    made = replace(
        new,
        start_at=started(new, now),
        is_declared=is_declared,
        create_time=now,
        update_time=now,
        updated_by=who,
        id=id,
    )
    return made if made.is_paused else replace(made, next_at=made.parsed().after(now))


def _next_at(
    known: RecurringSchedule, changes: Mapping[str, Any], now: datetime
) -> datetime | None:
    """Return the first occurrence without a task after a change.

    An occurrence that has passed without a task stays missed if the times are the same, so that
    `missed` applies to it.
    """
    since = now
    if known.next_at is not None and changes.keys().isdisjoint({"timing", "tz", "start_at"}):
        since = min(now, known.next_at - timedelta(seconds=1))
    return replace(known, **changes).parsed().after(since)


def _changes(known: RecurringSchedule, new: RecurringSchedule, now: datetime) -> dict[str, Any]:
    """Return the fields in which a new definition differs from the stored one."""
    changes = {
        field: getattr(new, field)
        for field in DEFINED
        if getattr(known, field) != getattr(new, field)
    }
    if not has_same_start(known, new):
        changes["start_at"] = new.start_at
    elif "timing" in changes:
        changes["start_at"] = started(new, now)
    return changes


# -- declarations --------------------------------------------------------------------------------


def follow(runtime: Runtime) -> None:
    """Make the declared schedules in the table those of this process.

    A declaration that cannot be stored is reported and stops no other one.
    """
    registry, events = runtime.registry, runtime.events
    declared = _by_name([make() for make in registry.schedules])
    known = {schedule.name: schedule for schedule in runtime.recurring_table.declared()}
    for definition in declared.values():
        store = partial(_store, runtime, definition, known.get(definition.name))
        events.attempt("recurring", definition.name, store)
    for schedule in known.values():
        if schedule.name not in declared:
            remove = partial(_remove, runtime, schedule)
            events.attempt("recurring", schedule.name, remove)


def _by_name(definitions: Sequence[Definition]) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for each in definitions:
        if found.setdefault(each.name, each) != each:
            raise ConfigError(
                f"code declares the recurring schedule {each.name!r} twice, so no declaration is "
                "stored: give one of them another name="
            )
    return found


def _store(runtime: Runtime, definition: Definition, known: RecurringSchedule | None) -> None:
    new = checked(runtime, definition)
    if known is None or not is_same_definition(known, new):
        put(runtime, new, is_declared=True)


def _remove(runtime: Runtime, known: RecurringSchedule) -> None:
    """Remove a schedule that is no longer declared, if this process has the code of its tasks."""
    if not is_known(known, runtime.registry, runtime.celery.tasks):
        return
    try:
        remove_schedule(runtime, known.name, None, None)
    except TaskNotFoundError:
        pass  # another worker has removed it
