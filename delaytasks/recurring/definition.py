"""Recurring schedules: what callers define, what the table has, and what each one makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args
from zoneinfo import ZoneInfo

from delaytasks.db.schema import TIMING_LENGTH
from delaytasks.model.clock import LATEST, json_fields
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import (
    celery_tag,
    check_choice,
    check_instant,
    check_schedule_name,
    check_wait,
    decode_meta,
)
from delaytasks.model.moves import RetrySchedule
from delaytasks.model.task import NewTask, decoded, shown_json
from delaytasks.model.text import shown
from delaytasks.recurring.timing import (
    ANY_START,
    EVERY,
    Timing,
    interval_text,
    parse_timing,
    timing_of,
)

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

# -- A recurring schedule as callers and the sweep read it ----------------------------------------


Missed = Literal["latest", "skip", "all"]
Overlap = Literal["allow", "skip"]


@dataclass(frozen=True, slots=True)
class RecurringSchedule:
    """A row of `yb_delay_recurring` as it was when it was read.

    The fields are listed here only. Those without a default are what callers define; the others
    change while the schedule recurs.

    Attributes
    ----------
    name
        The name.
    tag, body_json, queue, priority, headers_json, meta_json, limit_key
        The values of each task of the schedule. `body` and `meta` decode two of them.
    timing, tz, start_at
        When tasks are due: a cron expression and its time zone, or for example `"every 5m"`, and
        the first occurrence of an interval or the earliest one of a cron expression.
    jitter_s
        Each task is due up to this time after its occurrence.
    missed
        The rule for occurrences for which no task was made in time.
    overlap
        Whether an occurrence is skipped while the task before it has not ended.
    is_declared
        Whether code declares the schedule.
    is_paused
        Whether the schedule is paused.
    next_at
        The first occurrence that has no task yet. None if the schedule is paused or has ended.
    last_at, last_task_id
        The last occurrence that has a task, and the id of the last task.
    version
        The number of changes of the row.
    create_time, update_time, updated_by
        The times of the first and the last definition, and the actor of the last one.

    Examples
    --------
    >>> schedule = delays.recurring.get("report")
    >>> schedule.timing, schedule.tz
    ('0 9 * * mon-fri', 'Europe/Berlin')
    """

    name: str
    tag: str
    body_json: str
    queue: str
    priority: int
    headers_json: str | None
    meta_json: str | None
    limit_key: str | None
    timing: str
    tz: str
    start_at: datetime | None
    jitter_s: float
    missed: Missed
    overlap: Overlap
    is_declared: bool = False
    is_paused: bool = False
    next_at: datetime | None = None
    last_at: datetime | None = None
    last_task_id: int | None = None
    version: int = 0
    create_time: datetime | None = None
    update_time: datetime | None = None
    updated_by: str | None = None
    id: int = 0

    @property
    def body(self) -> Any:
        """The decoded body."""
        return decoded(self.body_json, f"the body of the recurring schedule {self.name!r}")

    @property
    def meta(self) -> dict[str, str]:
        """The meta of each task."""
        return decode_meta(self.meta_json)

    def parsed(self) -> Timing:
        """Return the timing, or raise `InvalidInputError` if another program has written it."""
        return parse_timing(self.timing, self.tz, self.start_at)

    def between(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Yield the occurrences after `since`, up to `until`."""
        timing = self.parsed()
        at = timing.after(since)
        while at is not None and at <= until:
            yield at
            at = timing.after(at)

    def next(self, count: int, after: datetime) -> list[datetime]:
        """Return occurrences of the timing in UTC, whether or not the schedule is paused.

        Parameters
        ----------
        count
            The most occurrences to return.
        after
            An aware datetime. All occurrences are later.
        """
        return list(islice(self.between(after, LATEST), count))

    def key_of(self, at: datetime) -> str:
        """Return the key of the task of an occurrence."""
        shown = at.isoformat(timespec="milliseconds" if at.microsecond else "seconds")
        return f"{self.name}@{shown.removesuffix('+00:00')}Z"

    @property
    def is_interval(self) -> bool:
        return self.timing.startswith(f"{EVERY} ")

    def start(self, now: datetime) -> datetime | None:
        """Return the start of a new schedule: an interval without one starts now."""
        if self.start_at is None and self.is_interval:
            return now.replace(microsecond=0)
        return self.start_at

    def changes_to(self, new: RecurringSchedule) -> dict[str, Any]:
        """Return the fields, with their new values, in which the definition `new` differs.

        An interval without a start keeps its own.
        """
        changes = {
            name: getattr(new, name)
            for name in DEFINED
            if getattr(self, name) != getattr(new, name)
        }
        if new.start_at is None and new.is_interval:
            changes.pop("start_at", None)
        return changes

    def as_json(self) -> dict[str, Any]:
        """Return the schedule as a JSON document.

        A body that no key of this process decrypts is replaced by a text that says so.
        """
        document = {name: getattr(self, name) for name in FIELDS}
        document["body"] = shown_json(document.pop("body_json"))
        document["meta"] = decode_meta(document.pop("meta_json"))
        return json_fields(document)


FIELDS = [field.name for field in fields(RecurringSchedule)]
#: The fields that callers define, except the name.
DEFINED = [field.name for field in fields(RecurringSchedule) if field.default is MISSING][1:]


# -- What callers and decorators define -----------------------------------------------------------


MAX_JITTER_S = 86_400.0


class RecurringOptions(TypedDict, total=False):
    """The options of a recurring schedule; `Recurring.set` explains them."""

    every: float | str | timedelta | None
    tz: str | ZoneInfo | None
    start: datetime | None
    jitter: float | str | timedelta
    missed: Missed
    overlap: Overlap
    queue: str | None
    priority: int
    retries: RetrySchedule | str | int | None
    max_late: float | str | timedelta | None
    limit_key: str | None
    meta: Mapping[str, str] | None
    body_version: int | None


#: The options of each task, as `schedule_delay` has them.
_OF_TASKS = ("queue", "priority", "retries", "max_late", "limit_key", "meta", "body_version")
#: The values of the options that are one of several words.
_WORDS = {"missed": get_args(Missed), "overlap": get_args(Overlap)}


class Definition(NamedTuple):
    """A schedule as a caller or a decorator defines it, before it is checked."""

    name: str
    tag: str
    body: Any
    #: A cron expression or a schedule of Celery; None if the options have an interval.
    cron: Any
    options: RecurringOptions

    def checked(self, runtime: Runtime) -> RecurringSchedule:
        """Return the schedule, which is not stored yet. Its tasks are checked as new ones are."""
        options: Any = self.options
        name = check_schedule_name(self.name)
        recurrence = recurrence_of(self.cron, options, default_tz(runtime))
        given = {name: options[name] for name in _OF_TASKS if name in options}
        [task] = runtime.producer.build([NewTask(self.tag, self.body, 0, **given)], "reject")
        return RecurringSchedule(
            name=name,
            tag=task.tag,
            body_json=task.body_json,
            queue=task.queue,
            priority=task.priority,
            headers_json=task.headers_json,
            meta_json=task.meta_json,
            limit_key=task.limit_key,
            **recurrence,
        )


def default_tz(runtime: Runtime) -> str:
    """Return the time zone of cron expressions without one."""
    return str(runtime.celery.conf.timezone or "UTC")


def recurrence_of(cron: Any, options: RecurringOptions, default_tz: str) -> dict[str, Any]:
    """Return the fields that say when tasks recur, checked."""
    unknown = options.keys() - RecurringOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(["cron", *RecurringOptions.__annotations__])
        raise TypeError(
            f"a recurring schedule has no option {', '.join(sorted(unknown))} (known: {known})"
        )
    timing, own_tz = _timing(cron, options.get("every"))
    tz, start = str(options.get("tz") or own_tz or default_tz), options.get("start")
    start_at = None if start is None else check_instant(start, "start").replace(microsecond=0)
    parse_timing(timing, tz, start_at or ANY_START)  # raises the error of a wrong timing
    words = {"missed": options.get("missed", "latest"), "overlap": options.get("overlap", "allow")}
    for name, word in words.items():
        check_choice(word, name, _WORDS[name])
    return {
        "timing": timing,
        "tz": tz,
        "start_at": start_at,
        "jitter_s": check_wait(options.get("jitter", 0), "jitter", MAX_JITTER_S),
        **words,
    }


def _timing(cron: object, every: Any) -> tuple[str, str | None]:
    """Return the text of a timing, and the time zone that a schedule of Celery has itself."""
    if (cron is None) == (every is None):
        raise InvalidInputError(
            "say when the task recurs: give a cron expression (cron) or an interval (every), one "
            "of the two",
            "cron",
        )
    if every is not None:
        return interval_text(every), None
    if not isinstance(cron, str):
        return timing_of(cron)
    text = " ".join(cron.split())
    if len(text) > TIMING_LENGTH:
        raise InvalidInputError(f"a cron expression has at most {TIMING_LENGTH} characters", "cron")
    return text, None


# -- The targets of schedules: the tasks of a tag, or a Celery task -------------------------------


#: The fields in the body of a schedule of a Celery task.
CALL_FIELDS = ("args", "kwargs", "options")
_OWN_TIMES = {"countdown", "eta"}


def definition_of(
    target: Any, name: str | None, body: Any, cron: Any, options: RecurringOptions
) -> Definition:
    """Return the definition of a schedule by what a caller names as its target.

    Parameters
    ----------
    target
        A tag, a processor, or a Celery task.
    name
        The name; None means the tag, or the name of the Celery task.
    body
        The body of each task; for a Celery task None, or a mapping with `args`, `kwargs` and
        `options` of `apply_async`.
    """
    own_name = tag = target if isinstance(target, str) else getattr(target, "tag", None)
    if not isinstance(tag, str) and callable(getattr(target, "apply_async", None)):
        own_name = target.name
        tag, body = celery_call(target.name, {} if body is None else body)
    elif not isinstance(tag, str):
        raise TypeError(
            f"{getattr(target, '__qualname__', target)!s} is no processor and no Celery task: "
            "write @delays.recurring(...) above the decorator that makes it one"
        )
    chosen = check_schedule_name(own_name if name is None else name)
    return Definition(chosen, tag, body, cron, options)


def celery_call(task: str, call: Any) -> tuple[str, dict[str, Any]]:
    """Return the tag and the body of rows that send a Celery task with `args`, `kwargs` and
    `options`."""
    if not isinstance(call, Mapping) or not call.keys() <= set(CALL_FIELDS):
        raise InvalidInputError(
            f"the body of a recurring Celery task has {', '.join(CALL_FIELDS)}, not {shown(call)}",
            "body",
        )
    if not _OWN_TIMES.isdisjoint(call.get("options") or ()):
        raise InvalidInputError(
            f"the options of the recurring Celery task {task} have a countdown or an eta; its "
            "schedule says when it is due",
            "body",
        )
    return celery_tag(task), {"task": task, **call}
