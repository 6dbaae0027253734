"""Reads the schedules of Celery beat, django-celery-beat and RedBeat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.broker.arming import SWEEP
from delaytasks.model.errors import ConfigError, DelayTaskError
from delaytasks.recurring.definition import Definition, celery_call
from delaytasks.recurring.recurring import put

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


class CeleryEntry(NamedTuple):
    """A periodic task of Celery, as its scheduler keeps it."""

    name: str
    task: str
    schedule: Any
    args: Any
    kwargs: Any
    options: Mapping[str, Any]
    is_enabled: bool = True
    start: datetime | None = None
    #: Why it cannot become a recurring schedule.
    problem: str | None = None


class Imported(NamedTuple):
    """The result for one entry, or with a dry run the expected one."""

    name: str
    task: str
    #: "added", "changed", "unchanged", or "refused" with a problem.
    result: str
    timing: str = ""
    problem: str = ""


def import_entries(
    entries: Iterator[CeleryEntry], runtime: Runtime, is_dry_run: bool
) -> Iterator[Imported]:
    """Store the entries one by one, and yield the result for each.

    An import that was interrupted can be repeated. It leaves schedules that are stored as they
    are.
    """
    for entry in entries:
        if entry.task == SWEEP:
            continue  # it makes beat sweep, and a copy of it is in each beat's store
        try:
            yield _import(entry, runtime, is_dry_run)
        except (DelayTaskError, TypeError, ValueError) as error:
            yield Imported(entry.name, entry.task, "refused", problem=str(error))


def _import(entry: CeleryEntry, runtime: Runtime, is_dry_run: bool) -> Imported:
    if entry.problem is not None:
        return Imported(entry.name, entry.task, "refused", problem=entry.problem)
    new = _definition(entry).checked(runtime)
    known = runtime.recurring_table.find(new.name)
    result = "added" if known is None else "changed" if known.changes_to(new) else "unchanged"
    if not is_dry_run:
        put(runtime, new, is_paused=not entry.is_enabled)
    return Imported(entry.name, entry.task, result, new.timing)


def _definition(entry: CeleryEntry) -> Definition:
    call = {
        "args": list(entry.args or ()),
        "kwargs": dict(entry.kwargs or {}),
        "options": dict(entry.options),
    }
    tag, body = celery_call(entry.task, call)
    # Beat's schedules may also be numbers of seconds and timedeltas.
    is_interval = isinstance(entry.schedule, (int, float, timedelta))
    cron, every = (None, entry.schedule) if is_interval else (entry.schedule, None)
    return Definition(entry.name, tag, body, cron, {"every": every, "start": entry.start})


def beat_entries(celery_app: Any) -> Iterator[CeleryEntry]:
    """Yield the entries of `beat_schedule`."""
    for name, entry in celery_app.conf.beat_schedule.items():
        yield CeleryEntry(
            name,
            entry["task"],
            entry["schedule"],
            entry.get("args"),
            entry.get("kwargs"),
            entry.get("options") or {},
        )


def django_entries(celery_app: Any) -> Iterator[CeleryEntry]:
    """Yield the periodic tasks in the tables of django-celery-beat."""
    try:
        import django
        from django.apps import apps

        if not apps.ready:
            django.setup()
        from django_celery_beat.models import PeriodicTask
    except Exception as error:
        raise ConfigError(
            f"the tables of django-celery-beat cannot be read: {type(error).__name__}: {error}; "
            "set DJANGO_SETTINGS_MODULE, and name the project's Celery app with -A"
        ) from error
    kinds = ("interval", "crontab", "solar", "clocked")
    for row in PeriodicTask.objects.select_related(*kinds).order_by("name").iterator():
        options = {
            name: value
            for name in ("queue", "exchange", "routing_key", "priority")
            if (value := getattr(row, name)) is not None
        }
        if headers := json.loads(row.headers or "{}"):
            options["headers"] = headers
        if row.expire_seconds is not None:
            options["max_late"] = row.expire_seconds
        yield CeleryEntry(
            row.name,
            row.task,
            None if row.clocked_id else row.schedule,
            json.loads(row.args or "[]"),
            json.loads(row.kwargs or "{}"),
            options,
            row.enabled,
            row.start_time,
            _django_problem(row),
        )


def _django_problem(row: Any) -> str | None:
    if row.clocked_id:
        return "it runs once, at an instant: use schedule_delay(at=)"
    if row.one_off:
        return "it runs once: use schedule_delay"
    if row.expires is not None:
        return f"it ends at {row.expires.isoformat()}, and a recurring schedule has no end"
    return None


def redbeat_entries(celery_app: Any) -> Iterator[CeleryEntry]:
    """Yield the entries in the Redis of RedBeat."""
    try:
        from redbeat.schedulers import RedBeatSchedulerEntry, ensure_conf, get_redis
    except ImportError as error:
        raise ConfigError(f"RedBeat cannot be imported: {error}; install it here") from error
    conf = ensure_conf(celery_app)
    for key in get_redis(celery_app).zrange(conf.schedule_key, 0, -1):
        try:
            entry = RedBeatSchedulerEntry.from_key(key, app=celery_app)
        except KeyError:
            continue  # it was deleted meanwhile
        yield CeleryEntry(
            entry.name,
            entry.task,
            entry.schedule,
            entry.args,
            entry.kwargs,
            entry.options,
            entry.enabled,
        )


SOURCES: Mapping[str, Callable[[Any], Iterator[CeleryEntry]]] = {
    "beat": beat_entries,
    "django": django_entries,
    "redbeat": redbeat_entries,
}
