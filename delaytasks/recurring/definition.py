"""Recurring schedules: when each one is due, what callers define, and what the table has.

A timing is stored as text: a cron expression of five fields, or of six with seconds first, such as
`0 9 * * mon-fri`, or an interval such as `every 300`, in seconds. `parse_timing` reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, fields
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args
from zoneinfo import ZoneInfo

from celery.schedules import crontab, schedule
from cronsim import CronSim, CronSimError

from delaytasks.db.schema import TIMING_LENGTH
from delaytasks.model.clock import LATEST, UTC, json_fields
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import (
    MAX_DELAY_S,
    celery_tag,
    check_choice,
    check_instant,
    check_schedule_name,
    check_wait,
    decode_meta,
    invalid,
    show_duration,
)
from delaytasks.model.moves import RetrySchedule
from delaytasks.model.task import NewTask, decoded, shown_json
from delaytasks.model.text import shown

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

ONE_SECOND = timedelta(seconds=1)
#: A start for the check of a timing.
ANY_START = datetime(2000, 1, 1, tzinfo=UTC)
EVERY = "every"


@dataclass(frozen=True)
class Every:
    """Occurrences at `start` and then after each `interval`, whatever wall clocks show."""

    interval: timedelta
    start: datetime

    def after(self, instant: datetime) -> datetime:
        """Return the first occurrence after `instant`, in UTC."""
        if instant < self.start:
            return self.start
        count = (instant - self.start) // self.interval + 1
        return self.start + count * self.interval


class Cron:
    """Occurrences of a cron expression on the wall clock of a time zone, as `cronsim` finds them.

    In an hour that the clocks skip or repeat, the rules of Debian's cron apply:

    - An expression of five fields with fixed times, whose minute and hour fields do not begin with
      `*`, is due once for each matching wall time. A time that the clocks skip is due when the
      skipped period ends. A time that they show twice is due the first time.
    - Any other expression is due whenever a clock on the wall shows a matching time. It is not due
      at times that the clocks skip, and twice at times that they show twice.

    Parameters
    ----------
    expression
        The fields of the expression.
    zone
        The time zone.
    start
        No occurrence is earlier. None means that there is no such bound.
    """

    def __init__(self, expression: str, zone: ZoneInfo, start: datetime | None) -> None:
        self._zone = zone
        self._start = start
        self._parsed = CronSim(expression, ANY_START.astimezone(zone))

    def after(self, instant: datetime) -> datetime | None:
        """Return the first occurrence after `instant`, in UTC; None after the last one."""
        if self._start is not None:
            instant = max(instant, self._start - ONE_SECOND)
        return self._after(instant.replace(microsecond=0))

    # Schedules with the same timing, such as those of many tenants, share this cache.
    @lru_cache(maxsize=4096)  # noqa: B019 - `parse_timing` keeps as many timings
    def _after(self, instant: datetime) -> datetime | None:
        matches = copy(self._parsed)  # to read the expression again would take longer
        shown = instant.astimezone(self._zone)
        # For fixed times, cronsim counts on naive wall times.
        matches.dt = shown.replace(tzinfo=None) if matches.fixup_tz else shown
        for found in matches:
            at = found.astimezone(UTC)
            if at > instant:  # otherwise the clocks show the time for the second time
                return at
        return None


Timing = Every | Cron


@lru_cache(maxsize=4096)
def parse_timing(text: str, tz: str, start: datetime | None = None) -> Timing:
    """Return the timing of a stored text.

    Parameters
    ----------
    text
        A cron expression, or an interval.
    tz
        The name of the time zone of a cron expression.
    start
        The first occurrence of an interval; for a cron expression, the earliest one.

    Raises
    ------
    InvalidInputError
        If the text is no timing, or there is no such time zone.
    """
    zone = zone_of(tz)
    kind, _, rest = text.partition(" ")
    if kind == EVERY:
        if start is None:
            raise InvalidInputError(f"{shown(text)} has no start", "start")
        return Every(timedelta(seconds=_whole_seconds(rest)), start)
    try:
        made = Cron(text, zone, start)
    except (CronSimError, ValueError) as error:
        raise InvalidInputError(
            f"{shown(text)} is no cron expression ({error}); write minute, hour, day of the month, "
            "month and weekday, as in '0 9 * * mon-fri'",
            "cron",
        ) from None
    if made.after(start or ANY_START) is None:
        raise InvalidInputError(f"{shown(text)} never matches a day", "cron")
    return made


def zone_of(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise InvalidInputError(
            f"there is no time zone {shown(name)}; write it as Europe/Berlin or UTC", "tz"
        ) from None


def interval_text(every: object) -> str:
    """Return the timing of an interval: seconds, a timedelta, or a text such as "5m"."""
    seconds = _whole_seconds(every)
    text = show_duration(seconds)  # without the smaller units
    return f"{EVERY} {text if _whole_seconds(text) == seconds else f'{seconds}s'}"


def _whole_seconds(every: object) -> int:
    seconds = check_wait(every, "every", MAX_DELAY_S)
    if seconds < 1 or seconds != int(seconds):
        raise invalid("every", f"is a whole number of seconds, not {shown(every)}")
    return int(seconds)


# -- The timing of Celery's schedules: `crontab` and `schedule` -----------------------------------


def timing_of(found: Any) -> tuple[str, str | None]:
    """Return the timing of a schedule of Celery, and the time zone that it has itself.

    Raises
    ------
    InvalidInputError
        If this is no schedule, or one of another class that computes its own times.
    """
    if isinstance(found, crontab):
        # django-celery-beat's subclass has a time zone of its own.
        tz = vars(found).get("tz")
        return _celery_crontab(found), None if tz is None else str(tz)
    if type(found) is schedule:  # a subclass computes its own times
        return interval_text(found.run_every), None
    raise InvalidInputError(
        f"{shown(found)} is no crontab or schedule of Celery: only beat knows its times", "cron"
    )


def _celery_crontab(found: crontab) -> str:
    day = _cron_field(found.day_of_month, 1, 32)
    weekday = _cron_field(found.day_of_week, 0, 7)
    if "*" not in (day, weekday):
        raise InvalidInputError(
            f"{shown(found)} is due if the day of the month and the weekday match, and a cron "
            "expression if one of them does; write it as text, for example '0 9 * * mon#1' for the "
            "first Monday of each month",
            "cron",
        )
    minute, hour = _cron_field(found.minute, 0, 60), _cron_field(found.hour, 0, 24)
    return f"{minute} {hour} {day} {_cron_field(found.month_of_year, 1, 13)} {weekday}"


def _cron_field(numbers: set[int], first: int, end: int) -> str:
    """Return the field of a cron expression that names these numbers of all in [first, end)."""
    steps = (step for step in range(1, end) if numbers == set(range(first, end, step)))
    step = next(steps, None)
    if step is None or len(numbers) == 1:
        return ",".join(map(str, sorted(numbers)))
    return "*" if step == 1 else f"*/{step}"


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
