"""Recurring schedules: what callers define, what the table has, and what each one makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Literal, NamedTuple, TypedDict, cast, get_args
from zoneinfo import ZoneInfo

from delaytasks.db.schema import TIMING_LENGTH
from delaytasks.model.body import decoded, is_encrypted, placeholder
from delaytasks.model.celery_calls import CELERY_PREFIX, celery_tag
from delaytasks.model.clock import LATEST
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import (
    check_instant,
    check_schedule_name,
    check_wait,
    decode_meta,
    is_integer,
)
from delaytasks.model.outcomes import RetrySchedule
from delaytasks.model.task import DelayedTask, NewTask
from delaytasks.model.text import shown
from delaytasks.recurring.timing import (
    ANY_START,
    EVERY,
    FoundTiming,
    Timing,
    interval_text,
    parse_timing,
    timing_of,
)
from delaytasks.registry import Registry

# -- A recurring schedule as callers and the sweep read it ----------------------------------------


Missed = Literal["latest", "skip", "all"]
Overlap = Literal["allow", "skip"]
#: The fields that callers define. The other fields of a schedule change while it recurs.
DEFINED = (
    "tag body_json queue priority headers_json limit_key timing tz jitter_s missed "
    "most_missed overlap"
).split()


#: The name of the meta in the headers of a schedule, which has no column for it.
META = "meta"


@dataclass(frozen=True, slots=True)
class RecurringSchedule:
    """A row of `yb_delay_recurring` as it was when it was read.

    Attributes
    ----------
    name
        The name.
    tag, body_json, queue, priority, headers_json, limit_key
        The values of each task of the schedule. `body` decodes the body, and `meta` the meta, which
        is a part of `headers_json`.
    timing, tz, start_at
        When tasks are due: a cron expression and its time zone, or for example `"every 300"`, and
        the first occurrence of an interval or the earliest one of a cron expression.
    jitter_s
        Each task is due up to this time after its occurrence.
    missed, most_missed
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
    limit_key: str | None
    timing: str
    tz: str
    start_at: datetime | None
    jitter_s: float
    missed: Missed
    most_missed: int
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
        return decode_meta(task_options(self)[1])

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

    def as_json(self) -> dict[str, Any]:
        """Return the schedule as a JSON document.

        A body that no key of this process decrypts is replaced by a text that says so.
        """
        instants = "start_at next_at last_at create_time update_time".split()
        document = {field: getattr(self, field) for field in self.__slots__}
        text = document.pop("body_json")
        document["headers_json"], _ = task_options(self)
        document["meta"] = self.meta
        document["body"] = placeholder(text) if is_encrypted(text) else self.body
        for field in instants:
            document[field] = None if document[field] is None else document[field].isoformat()
        return document


def is_same_definition(known: RecurringSchedule, new: RecurringSchedule) -> bool:
    """Return whether `new`, which is not stored yet, has the definition of `known`."""
    return has_same_start(known, new) and all(getattr(known, f) == getattr(new, f) for f in DEFINED)


def has_same_start(known: RecurringSchedule, new: RecurringSchedule) -> bool:
    """Return whether `new` starts as `known`. An interval without a start keeps its own."""
    keeps_start = new.start_at is None and new.timing.startswith(f"{EVERY} ")
    return keeps_start or new.start_at == known.start_at


def check_readable(schedule: RecurringSchedule) -> None:
    """Raise `BodyEncryptedError` if no key of this process decrypts the body."""
    if is_encrypted(schedule.body_json):
        decoded(schedule.body_json, f"the body of the recurring schedule {schedule.name!r}")


def task_options(schedule: RecurringSchedule) -> tuple[str | None, str | None]:
    """Return the headers and the meta of each task, as the row of the task stores them."""
    if schedule.headers_json is None:
        return None, None
    try:
        headers = json.loads(schedule.headers_json)
        meta = headers.pop(META, None)
    except (ValueError, AttributeError, RecursionError):
        return schedule.headers_json, None  # another program has written them
    return _compact(headers), _compact(meta)


def headers_with_meta(headers_json: str | None, meta_json: str | None) -> str | None:
    """Return the headers of a schedule whose tasks have these headers and this meta."""
    if meta_json is None:
        return headers_json
    return _compact({**json.loads(headers_json or "{}"), META: json.loads(meta_json)})


def _compact(document: Any) -> str | None:
    return json.dumps(document, separators=(",", ":")) if document else None


MAX_JITTER_S = 86_400.0
MAX_MISSED = 1000
DEFAULT_MISSED = 100


class RecurringOptions(TypedDict, total=False):
    """The options of a recurring schedule; `Recurring.set` explains them."""

    every: float | str | timedelta | None
    tz: str | ZoneInfo | None
    start: datetime | None
    jitter: float | str | timedelta
    missed: Missed
    most_missed: int
    overlap: Overlap
    queue: str | None
    priority: int
    retries: RetrySchedule | str | int | None
    max_late: float | str | timedelta | None
    limit_key: str | None
    meta: Mapping[str, str] | None
    body_version: int | None


class Recurrence(TypedDict):
    """The fields of a schedule that say when its tasks recur."""

    timing: str
    tz: str
    start_at: datetime | None
    jitter_s: float
    missed: Missed
    most_missed: int
    overlap: Overlap


_OF_TASKS = ("queue", "priority", "retries", "max_late", "limit_key", "meta", "body_version")


class Definition(NamedTuple):
    """A schedule as a caller or a decorator defines it, before it is checked."""

    name: str
    tag: str
    body: Any
    #: A cron expression or a schedule of Celery; None if the options have an interval.
    cron: Any
    options: RecurringOptions

    def checked(
        self, build: Callable[[NewTask], DelayedTask], default_tz: str
    ) -> RecurringSchedule:
        """Return the schedule, which is not stored yet.

        Parameters
        ----------
        build
            Checks a task and returns it, as for `schedule_delay`.
        default_tz
            The time zone of a cron expression without one.
        """
        name, recurrence = check_schedule_name(self.name), self.recurrence(default_tz)
        task = build(_new_task(self.tag, self.body, self.options))
        return RecurringSchedule(
            name=name,
            tag=task.tag,
            body_json=task.body_json,
            queue=task.queue,
            priority=task.priority,
            headers_json=headers_with_meta(task.headers_json, task.meta_json),
            limit_key=task.limit_key,
            **recurrence,
        )

    def recurrence(self, default_tz: str) -> Recurrence:
        """Return the checked options that say when tasks recur."""
        options = self.options
        unknown = options.keys() - RecurringOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(["cron", *RecurringOptions.__annotations__])
            raise TypeError(
                f"a recurring schedule has no option {', '.join(sorted(unknown))} (known: {known})"
            )
        timing, own_tz = _timing(self.cron, options.get("every"))
        tz, start = str(options.get("tz") or own_tz or default_tz), options.get("start")
        start_at = None if start is None else check_instant(start, "start").replace(microsecond=0)
        parse_timing(timing, tz, start_at or ANY_START)  # raises the error of a wrong timing
        return {
            "timing": timing,
            "tz": tz,
            "start_at": start_at,
            "jitter_s": check_wait(options.get("jitter", 0), MAX_JITTER_S, "jitter"),
            "missed": cast(Missed, _one_of("missed", options.get("missed", "latest"), Missed)),
            "most_missed": _most_missed(options.get("most_missed", DEFAULT_MISSED)),
            "overlap": cast(Overlap, _one_of("overlap", options.get("overlap", "allow"), Overlap)),
        }


def options_of(schedule: RecurringSchedule, tag: str, body: Any) -> RecurringOptions:
    """Return the options of a stored schedule except its timing, for a form that changes some.

    The body's version is kept if the form changes neither the tag nor the body.
    """
    # A task reads these options from the same headers.
    headers_json, _ = task_options(schedule)
    task = DelayedTask(0, schedule.tag, "", ANY_START, headers_json=headers_json)
    is_same_body = tag == schedule.tag and body == schedule.body
    return {
        "tz": schedule.tz,
        "start": schedule.start_at,
        "jitter": schedule.jitter_s,
        "missed": schedule.missed,
        "most_missed": schedule.most_missed,
        "overlap": schedule.overlap,
        "queue": schedule.queue,
        "priority": schedule.priority,
        "retries": task.retry_schedule,
        "max_late": task.max_late_s,
        "limit_key": schedule.limit_key,
        "meta": schedule.meta or None,
        "body_version": task.body_version if is_same_body else None,
    }


def timing_options(timing: str) -> dict[str, str]:
    """Return the text of a timing as the option `cron` or `every` of `Recurring.set`."""
    text = " ".join(timing.split())
    interval = text.removeprefix(f"{EVERY} ")
    return {"cron": text} if interval == text else {"every": interval}


def started(schedule: RecurringSchedule, now: datetime) -> datetime | None:
    """Return the start of a new schedule: an interval without one starts now."""
    if schedule.start_at is None and schedule.timing.startswith(f"{EVERY} "):
        return now.replace(microsecond=0)
    return schedule.start_at


def _timing(cron: object, every: Any) -> FoundTiming:
    if (cron is None) == (every is None):
        raise InvalidInputError(
            "say when the task recurs: give a cron expression (cron) or an interval (every), one "
            "of the two",
            "cron",
        )
    if every is not None:
        return FoundTiming(interval_text(every))
    if not isinstance(cron, str):
        return timing_of(cron)
    text = " ".join(cron.split())
    if len(text) > TIMING_LENGTH:
        raise InvalidInputError(f"a cron expression has at most {TIMING_LENGTH} characters", "cron")
    return FoundTiming(text)


def _new_task(tag: str, body: Any, options: RecurringOptions) -> NewTask:
    given: dict[str, Any] = {name: options[name] for name in _OF_TASKS if name in options}  # type: ignore[literal-required]
    return NewTask(tag, body, 0, **given)


def _one_of(name: str, value: object, kind: Any) -> str:
    allowed = get_args(kind)
    if value not in allowed:
        raise InvalidInputError(
            f"{name} is one of {', '.join(map(repr, allowed))}, not {shown(value)}", name
        )
    return str(value)


def _most_missed(number: object) -> int:
    if not is_integer(number, 1, MAX_MISSED):
        raise InvalidInputError(
            f"most_missed is a number from 1 to {MAX_MISSED}, not {shown(number)}", "most_missed"
        )
    return number


# -- The targets of schedules: the tasks of a tag, or a Celery task -------------------------------

# Each target is a tag and a body. This is the only module that knows how a Celery task becomes
# one.


#: The fields in the body of a schedule of a Celery task.
CALL_FIELDS = ("args", "kwargs", "options")
_OWN_TIMES = {"countdown", "eta"}


class RecurringTarget(NamedTuple):
    tag: str
    body: Any
    #: The name of a schedule for which the caller gives none.
    name: str


def target_of(target: Any, body: Any, registry: Registry) -> RecurringTarget | None:
    """Return the target that a caller names, or None if it is no tag, processor or Celery task.

    Parameters
    ----------
    target
        A tag, a processor, or a Celery task.
    body
        The body of each task; for a Celery task None, or a mapping with `args`, `kwargs` and
        `options` of `apply_async`.
    """
    tag = target if isinstance(target, str) else getattr(target, "tag", None)
    if isinstance(tag, str):
        return RecurringTarget(tag, body, tag)
    if callable(getattr(target, "apply_async", None)):
        return call_of(target.name, {} if body is None else body)
    for processor in registry:
        if processor.function is target:
            return RecurringTarget(processor.tag, body, processor.tag)
    return None


def call_of(task: str, call: Any) -> RecurringTarget:
    """Return the target that sends a Celery task, with the `args`, `kwargs` and `options`."""
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
    return RecurringTarget(celery_tag(task), {"task": task, **call}, task)


def is_known(schedule: RecurringSchedule, registry: Registry, celery_tasks: Container[str]) -> bool:
    """Return whether the code of this process has the processor or the Celery task."""
    if schedule.tag.startswith(CELERY_PREFIX):
        return schedule.body["task"] in celery_tasks
    return registry.get(schedule.tag) is not None
