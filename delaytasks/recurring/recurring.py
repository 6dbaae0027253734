"""`delays.recurring`: declares, stores, changes and reads recurring schedules.

Each worker compares the table with the schedules that its code declares, at its start and then
every `FOLLOW_S`. A worker that has the processor of a tag, or a Celery task, knows all declared
schedules of it. It therefore adds and changes them, and removes those that its code no longer
declares. A pause belongs to the operator and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from celery.local import PromiseProxy

from delaytasks.loops import CallGroup, twin
from delaytasks.model.errors import (
    ConfigError,
    DuplicateTaskError,
    InvalidInputError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.model.inputs import (
    CELERY_PREFIX,
    actor_of,
    check_page_limit,
    check_schedule_name,
    check_tag,
)
from delaytasks.model.task import DelayedTask
from delaytasks.recurring.creation import Visit, make_tasks, new_task, report
from delaytasks.recurring.definition import (
    Definition,
    RecurringOptions,
    RecurringSchedule,
    definition_of,
    recurrence_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
            recurrence_of(cron, options, "UTC")
            make = partial(definition_of, function, name, body, cron, options)
            if not isinstance(function, PromiseProxy):
                make()
            # The name of a Celery task is unknown until its app is finalized.
            self._delays._registry.schedules.append(make)
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
            one, `"all"` runs the last 1,000, `"skip"` runs none that passed more than a minute ago.
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
        new = definition_of(tag, name, body, cron, options).checked(self._runtime)
        return put(self._runtime, new, session, actor)

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

        def work(change: Change, known: RecurringSchedule) -> RecurringSchedule:
            if known.is_paused:
                return known
            change.cancel_waiting(known)
            return change.update("paused", known, {"is_paused": True, "next_at": None})

        return _change(self._runtime, name, work, session, actor)

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

        def work(change: Change, known: RecurringSchedule) -> RecurringSchedule:
            if not known.is_paused:
                return known
            next_at = known.parsed().after(change.now)
            resumed = change.update("resumed", known, {"is_paused": False, "next_at": next_at})
            return change.with_first_tasks(resumed)

        return _change(self._runtime, name, work, session, actor)

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
        made: list[DelayedTask] = []

        def work(change: Change, known: RecurringSchedule) -> RecurringSchedule:
            at = change.now.replace(microsecond=change.now.microsecond // 1000 * 1000)
            task = new_task(known, at, at, change.runtime.new_id(), change.now)
            made[:] = [task]  # a transaction may be tried again
            changes: dict[str, Any] = {"last_task_id": task.id}
            if known.overlap == "skip" and not known.is_paused:
                change.cancel_waiting(known)
                changes["next_at"] = known.parsed().after(change.now)
            table = change.runtime.recurring_table
            if not table.take_keys(change.on, made):
                raise DuplicateTaskError(f"a task {task.key!r} of this millisecond lives already")
            table.write(change.on, made)
            change.made += made
            return change.update("run", known, changes)

        _change(self._runtime, name, work, session, None)
        [task] = made
        self._runtime.events.emit("task.scheduled", id=task.id, tag=task.tag)
        return task

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

        Raises
        ------
        InvalidInputError
            If a name, a tag or the limit is wrong.

        Examples
        --------
        >>> [schedule.name for schedule in delays.recurring.list(tag="report.send")]
        ['report-acme', 'report-initech']
        """
        runtime = self._runtime
        check_page_limit(limit)
        return runtime.recurring_table.page(
            None if tag is None else check_tag(tag),
            None if prefix in (None, "") else check_schedule_name(prefix, "prefix"),
            None if after is None else check_schedule_name(after, "after"),
            limit,
        )

    alist = twin(list)


# -- the table -----------------------------------------------------------------------------------


@dataclass
class Change:
    """One transaction that changes a schedule, and what it did, for the time after its commit."""

    runtime: Runtime
    on: Any
    now: datetime
    who: str
    #: The kind of the change; empty if nothing was changed.
    kind: str = ""
    #: Id and tag of the tasks that were cancelled.
    cancelled: list[tuple[int, str]] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    made: list[DelayedTask] = field(default_factory=list)

    def update(
        self, kind: str, known: RecurringSchedule, changes: Mapping[str, Any]
    ) -> RecurringSchedule:
        self.kind = kind
        return self.runtime.recurring_table.update(self.on, known, changes)

    def cancel_waiting(self, known: RecurringSchedule) -> None:
        """Cancel the tasks that were made ahead and that wait. Those that run go on."""
        if known.last_at is None:
            return
        try:
            keys = [known.key_of(at) for at in known.between(self.now, known.last_at)]
        except InvalidInputError:
            return  # another program wrote the timing, and no sweep made tasks of it
        store = self.runtime.store
        ids = sorted(store.tasks.ids_of_keys(known.tag, keys, self.on).values())
        # Together, since a schedule of each second has many.
        step = store.bulk.cancel(self.on, ids)
        self.cancelled += [(entry.id, known.tag) for entry in step.moved]
        for id in step.busy:
            with suppress(TaskStateError):  # it runs, or has ended meanwhile
                store.tasks.cancel(id, on=self.on)
                self.cancelled.append((id, known.tag))

    def with_first_tasks(self, schedule: RecurringSchedule) -> RecurringSchedule:
        """Make the tasks of the occurrences that may pass before the next sweep."""
        runtime = self.runtime
        until = self.now + timedelta(seconds=runtime.settings.recurring_lead_s)
        if schedule.next_at is None or schedule.next_at > until:
            return schedule
        self.visits, _ = make_tasks(runtime, self.on, [schedule], self.now, until)
        self.made += [task for visit in self.visits for _, task in visit.tasks]
        return runtime.recurring_table.lock(self.on, schedule.name)


#: Changes a locked schedule and returns it as it is stored.
ChangeKnown = Callable[[Change, RecurringSchedule], RecurringSchedule]


def _change(
    runtime: Runtime,
    name: str,
    work: ChangeKnown,
    session: Any,
    actor: str | None,
    add: Callable[[Change], RecurringSchedule | None] = lambda change: None,
) -> RecurringSchedule:
    """Change a schedule in the caller's transaction, or in one of our own, and report it.

    `add` stores a schedule that does not exist, and returns None if it exists meanwhile.
    """
    check_schedule_name(name)
    transaction, now = runtime.transactions.of(session), runtime.clock.certain_now()
    who, table = actor_of(actor), runtime.recurring_table

    def begun(on: Any) -> tuple[RecurringSchedule, Change]:
        change = Change(runtime, on, now, who)
        known = table.find(name, on, locks=True)
        added = add(change) if known is None else None
        return added or work(change, known or table.lock(on, name)), change

    with transaction.guard() if transaction is not None else nullcontext() as on:
        schedule, change = table.transaction(begun, on)
    if change.kind:
        runtime.events.emit("recurring.changed", schedule=name, change=change.kind, actor=who)
    for id, tag in change.cancelled:
        runtime.events.emit("task.cancelled", id=id, tag=tag)
    report(runtime.events, change.visits)
    runtime.producer.arm_after_commit(change.made, transaction)
    return schedule


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

    def defined(change: Change) -> dict[str, Any]:
        return {"is_declared": is_declared, "update_time": change.now, "updated_by": change.who}

    def add(change: Change) -> RecurringSchedule | None:
        now = change.now
        made = replace(new, id=runtime.new_id(), start_at=new.start(now), create_time=now)
        next_at = None if is_paused else made.parsed().after(now)
        made = replace(made, is_paused=is_paused, next_at=next_at, **defined(change))
        if not runtime.recurring_table.insert(change.on, made):
            return None
        change.kind = "added"
        return change.with_first_tasks(made)

    def work(change: Change, known: RecurringSchedule) -> RecurringSchedule:
        if known.is_declared and not is_declared:
            raise InvalidInputError(
                f"the recurring schedule {known.name!r} is declared in code: change it there, "
                "or choose another name",
                "name",
            )
        changes = known.changes_to(new)
        if not changes and known.is_declared == is_declared:
            return known
        change.cancel_waiting(known)
        if "timing" in changes:
            changes["start_at"] = new.start(change.now)
        if not known.is_paused:
            changes["next_at"] = _next_at(known, changes, change.now)
        stored = change.update("changed", known, changes | defined(change))
        return change.with_first_tasks(stored)

    return _change(runtime, new.name, work, session, actor, add)


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


def remove_schedule(
    runtime: Runtime, name: str, session: Any = None, actor: str | None = None
) -> RecurringSchedule:
    """Delete the schedule, and cancel the waiting tasks of later occurrences."""

    def work(change: Change, known: RecurringSchedule) -> RecurringSchedule:
        change.cancel_waiting(known)
        runtime.recurring_table.delete(change.on, known)
        change.kind = "removed"
        return known

    return _change(runtime, name, work, session, actor)


# -- declarations --------------------------------------------------------------------------------


def follow(runtime: Runtime) -> None:
    """Make the declared schedules in the table those of this process.

    A declaration that cannot be stored is reported and stops no other one.
    """
    registry, events = runtime.registry, runtime.events
    declared: dict[str, Definition] = {}
    for each in [make() for make in registry.schedules]:
        if declared.setdefault(each.name, each) != each:
            raise ConfigError(
                f"code declares the recurring schedule {each.name!r} twice, so no declaration is "
                "stored: give one of them another name="
            )
    known = {schedule.name: schedule for schedule in runtime.recurring_table.declared()}
    for name in [*declared, *(known.keys() - declared.keys())]:
        step = partial(_follow_one, runtime, declared.get(name), known.get(name))
        events.attempt("recurring", name, step)


def _follow_one(
    runtime: Runtime, definition: Definition | None, known: RecurringSchedule | None
) -> None:
    """Store a declaration that differs from the table.

    A schedule that is no longer declared is removed if this process has the code of its tasks.
    """
    if definition is not None:
        new = definition.checked(runtime)
        if known is None or known.changes_to(new):
            put(runtime, new, is_declared=True)
        return
    assert known is not None
    if known.tag.startswith(CELERY_PREFIX):
        has_code = known.body["task"] in runtime.celery.tasks
    else:
        has_code = runtime.registry.get(known.tag) is not None
    if has_code:
        with suppress(TaskNotFoundError):  # another worker has removed it
            remove_schedule(runtime, known.name)
