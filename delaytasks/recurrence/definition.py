"""Checks the definition of a recurring schedule. Nothing is read or written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict, cast, get_args
from zoneinfo import ZoneInfo

from delaytasks.core.errors import InvalidScheduleError, InvalidTimingError
from delaytasks.core.inputs import check_instant, check_schedule_name, check_wait, is_integer
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.task import DelayTask, NewTask
from delaytasks.core.text import shown
from delaytasks.recurrence.celery_schedules import FoundTiming, interval_text, timing_of
from delaytasks.recurrence.schedule import (
    Missed,
    Overlap,
    RecurringSchedule,
    headers_with_meta,
    task_options,
)
from delaytasks.recurrence.timing import ANY_START, EVERY, parse_timing
from delaytasks.storage.schema import TIMING_LENGTH

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
    expires: float | str | timedelta | None
    concurrency_key: str | None
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


_OF_TASKS = ("queue", "priority", "retries", "expires", "concurrency_key", "meta", "body_version")


class Definition(NamedTuple):
    """A schedule as a caller or a decorator defines it, before it is checked."""

    name: str
    tag: str
    body: Any
    #: A cron expression or a schedule of Celery; None if the options have an interval.
    cron: Any
    options: RecurringOptions

    def checked(self, build: Callable[[NewTask], DelayTask], default_tz: str) -> RecurringSchedule:
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
            concurrency_key=task.concurrency_key,
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
        start_at = None if start is None else check_instant(start).replace(microsecond=0)
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
    task = DelayTask(0, schedule.tag, "", ANY_START, headers_json=headers_json)
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
        "expires": task.expires_s,
        "concurrency_key": schedule.concurrency_key,
        "meta": schedule.meta or None,
        "body_version": task.body_version if is_same_body else None,
    }


def timing_options(timing: str) -> dict[str, str]:
    """Return the text of a timing as the option `cron` or `every` of `Recurring.set`."""
    text = " ".join(timing.split())
    interval = text.removeprefix(f"{EVERY} ")
    return {"cron": text} if interval == text else {"every": interval}


def preview(cron: Any, options: RecurringOptions, after: datetime, count: int) -> list[datetime]:
    """Return the first occurrences of a timing that is not stored."""
    when = Definition("preview", "preview", None, cron, options).recurrence("UTC")
    timing = parse_timing(when["timing"], when["tz"], when["start_at"] or after)
    found, at = list[datetime](), timing.after(after)
    while at is not None and len(found) < count:
        found.append(at)
        at = timing.after(at)
    return found


def started(schedule: RecurringSchedule, now: datetime) -> datetime | None:
    """Return the start of a new schedule: an interval without one starts now."""
    if schedule.start_at is None and schedule.timing.startswith(f"{EVERY} "):
        return now.replace(microsecond=0)
    return schedule.start_at


def _timing(cron: object, every: Any) -> FoundTiming:
    if (cron is None) == (every is None):
        raise InvalidScheduleError(
            "say when the task recurs: give a cron expression (cron) or an interval (every), one "
            "of the two"
        )
    if every is not None:
        return FoundTiming(interval_text(every))
    if not isinstance(cron, str):
        return timing_of(cron)
    text = " ".join(cron.split())
    if len(text) > TIMING_LENGTH:
        raise InvalidTimingError(f"a cron expression has at most {TIMING_LENGTH} characters")
    return FoundTiming(text)


def _new_task(tag: str, body: Any, options: RecurringOptions) -> NewTask:
    given: dict[str, Any] = {name: options[name] for name in _OF_TASKS if name in options}  # type: ignore[literal-required]
    return NewTask(tag, body, 0, **given)


def _one_of(name: str, value: object, kind: Any) -> str:
    allowed = get_args(kind)
    if value not in allowed:
        raise InvalidScheduleError(
            f"{name} is one of {', '.join(map(repr, allowed))}, not {shown(value)}"
        )
    return str(value)


def _most_missed(number: object) -> int:
    if not is_integer(number, 1, MAX_MISSED):
        raise InvalidScheduleError(
            f"most_missed is a number from 1 to {MAX_MISSED}, not {shown(number)}"
        )
    return number
