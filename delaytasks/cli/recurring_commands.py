"""`delaytasks recurring` and `import`: recurring schedules, and those of Celery's schedulers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import click

from delaytasks.broker.arming import SWEEP
from delaytasks.cli.context import Cli, Command, Group, pass_cli
from delaytasks.cli.options import command_of
from delaytasks.cli.output import NOTED, Cell, Made, Table
from delaytasks.model.errors import ConfigError, DelayTaskError, InvalidInputError
from delaytasks.model.inputs import PAGE_MAX
from delaytasks.model.text import count
from delaytasks.operate.operations import OPERATIONS
from delaytasks.recurring.definition import Definition, RecurringSchedule, celery_call
from delaytasks.recurring.recurring import put
from delaytasks.runtime import Runtime, runtime_of


@click.group(cls=Group)
def recurring() -> None:
    """Recurring schedules. The commands `pause` and `resume` have --recurring NAME.

    \b
    delaytasks recurring set nightly report.send --cron "0 2 * * *" --tz Europe/Berlin
    delaytasks recurring list
    """


@recurring.command("list")
@click.argument("name", required=False)
@pass_cli
def list_(cli: Cli, name: str | None) -> None:
    """List schedules in the order of their names, with the next occurrence of each.

    \b
    delaytasks recurring list
    delaytasks recurring list 'eu-*'

    Tasks are made before they are due. "tasks until" is the last occurrence that has its task.
    """
    now = cli.runtime.clock.certain_now()
    if name is not None and not name.endswith("*"):
        found = [cli.delays.recurring.get(name)]
    else:
        prefix = None if name is None else name.removesuffix("*")
        found = cli.delays.recurring.list(prefix=prefix, limit=PAGE_MAX)
    columns = (
        "name,tag,timing,tz,next occurrence,tasks until=last_at,last task,declared=is_declared"
    )
    made: Made = {
        "next occurrence": lambda each: _next(each, now),
        "last task": lambda each: each.last_task_id and str(each.last_task_id),
    }
    table = Table.of(columns, found, made, folded="name,tag")
    cli.answer([schedule.as_json() for schedule in found], table)
    if not found:
        cli.note("No recurring schedules.")
    elif len(found) == PAGE_MAX:
        cli.note(f"There may be more than {PAGE_MAX:,}: name the beginning, as 'eu-*'.")


def _next(schedule: RecurringSchedule, now: datetime) -> Cell:
    if schedule.is_paused:
        return "paused", NOTED
    if schedule.next_at is None or schedule.next_at > now:  # else no task was made in time
        with suppress(InvalidInputError):  # another program has written the row
            # The next occurrence may have its task already.
            return next(iter(schedule.next(1, now)), "ended")
    return schedule.next_at


for _operation in OPERATIONS:
    if _operation.startswith("recurring "):
        recurring.add_command(command_of(_operation))


# -- `import`: the schedules of Celery beat, django-celery-beat and RedBeat ------------------------


class CeleryEntry(NamedTuple):
    """A periodic task of Celery, as its scheduler keeps it."""

    name: str
    task: str
    schedule: Any
    args: Any = ()
    kwargs: Any = {}
    options: Mapping[str, Any] = {}
    is_enabled: bool = True
    start: datetime | None = None
    #: Why it cannot become a recurring schedule.
    problem: str = ""


def import_entry(entry: CeleryEntry, runtime: Runtime, is_dry_run: bool) -> dict[str, str]:
    """Store an entry, and return the result, or with a dry run the expected one.

    An import that was interrupted can be repeated. It leaves schedules that are stored as they
    are.
    """
    done = {"name": entry.name, "task": entry.task, "timing": "", "problem": ""}
    try:
        if entry.problem:
            raise ConfigError(entry.problem)
        args, kwargs = list(entry.args or ()), dict(entry.kwargs or {})
        call = {"args": args, "kwargs": kwargs, "options": dict(entry.options)}
        tag, body = celery_call(entry.task, call)
        # Beat's schedules may also be numbers of seconds and timedeltas.
        is_interval = isinstance(entry.schedule, (int, float, timedelta))
        cron, every = (None, entry.schedule) if is_interval else (entry.schedule, None)
        made = Definition(entry.name, tag, body, cron, {"every": every, "start": entry.start})
        new = made.checked(runtime)
        known = runtime.recurring_table.find(new.name)
        if not is_dry_run:
            put(runtime, new, is_paused=not entry.is_enabled)
    except (DelayTaskError, TypeError, ValueError) as error:
        return {**done, "result": "refused", "problem": str(error)}
    changed = "changed" if known and known.changes_to(new) else "unchanged"
    return {**done, "result": changed if known else "added", "timing": new.timing}


def _beat(celery_app: Any) -> Iterator[CeleryEntry]:
    """Yield the entries of `beat_schedule`."""
    for name, entry in celery_app.conf.beat_schedule.items():
        call = {key: entry[key] for key in ("args", "kwargs", "options") if entry.get(key)}
        yield CeleryEntry(name, entry["task"], entry["schedule"], **call)


def _django(celery_app: Any) -> Iterator[CeleryEntry]:
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
        names = ("queue", "exchange", "routing_key", "priority")
        options = {
            **{name: getattr(row, name) for name in names},
            "headers": json.loads(row.headers or "{}") or None,
            "max_late": row.expire_seconds,
        }
        problem = ""
        if row.clocked_id or row.one_off:
            problem = "it runs once: use schedule_delay, with at= for an instant"
        elif row.expires is not None:
            problem = f"it ends at {row.expires.isoformat()}, and a recurring schedule has no end"
        yield CeleryEntry(
            row.name,
            row.task,
            None if row.clocked_id else row.schedule,
            json.loads(row.args or "[]"),
            json.loads(row.kwargs or "{}"),
            {name: value for name, value in options.items() if value is not None},
            row.enabled,
            row.start_time,
            problem,
        )


def _redbeat(celery_app: Any) -> Iterator[CeleryEntry]:
    """Yield the entries in the Redis of RedBeat."""
    try:
        from redbeat.schedulers import RedBeatSchedulerEntry, ensure_conf, get_redis
    except ImportError as error:
        raise ConfigError(f"RedBeat cannot be imported: {error}; install it here") from error
    conf = ensure_conf(celery_app)
    for key in get_redis(celery_app).zrange(conf.schedule_key, 0, -1):
        try:
            e = RedBeatSchedulerEntry.from_key(key, app=celery_app)
        except KeyError:
            continue  # it was deleted meanwhile
        yield CeleryEntry(e.name, e.task, e.schedule, e.args, e.kwargs, e.options, e.enabled)


SOURCES: Mapping[str, Callable[[Any], Iterator[CeleryEntry]]] = {
    "beat": _beat,
    "django": _django,
    "redbeat": _redbeat,
}


@click.command("import", cls=Command)
@click.argument("source", type=click.Choice([*SOURCES]))
@click.option("--dry-run", is_flag=True, help="Only show what would be stored.")
@pass_cli
def import_(cli: Cli, source: str, dry_run: bool) -> None:
    """Store the schedules of Celery beat, django-celery-beat or RedBeat. It can be repeated.

    \b
    delaytasks import beat --dry-run
    delaytasks import redbeat
    """
    cli.import_processors()
    runtime = runtime_of(cli.delays)
    entries = [entry for entry in SOURCES[source](cli.app) if entry.task != SWEEP]
    # A copy of the entry that makes beat sweep is in each beat's store.
    found = [import_entry(entry, runtime, dry_run) for entry in entries]
    columns = "name,Celery task=task,timing,result,problem"
    cli.answer(found, Table.of(columns, found, folded="name,problem"))
    refused = sum(entry["result"] == "refused" for entry in found)
    stored = len(found) - refused
    done = "would be stored" if dry_run else "are stored"
    cli.note(f"{count(stored, 'schedule')} {done}, and {refused} refused.")
