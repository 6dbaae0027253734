"""`recurring`: list, set, pause, resume, run, remove, next and import."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from delaytasks.cli.context import Cli, Group, pass_cli
from delaytasks.cli.output import NOTHING, Cell, cell, count, print_json, print_table, say
from delaytasks.cli.schedule import read_body
from delaytasks.cli.times import INSTANT, PAIR, pairs_or, show_instant
from delaytasks.core.errors import InvalidTimingError
from delaytasks.core.inputs import show_timing
from delaytasks.recurrence.definition import preview
from delaytasks.recurrence.imports import SOURCES, import_entries
from delaytasks.recurrence.recurring import default_tz
from delaytasks.recurrence.schedule import RecurringSchedule
from delaytasks.recurrence.timing import zone_of
from delaytasks.runtime import runtime_of

_actor_option = click.option("--actor", metavar="NAME", help="Who does it [you on this host].")
_name = click.argument("name")


def _timing(function: Callable[..., Any]) -> Callable[..., Any]:
    tz = click.option("--tz", metavar="ZONE", help="The time zone of --cron, as Europe/Berlin.")
    every = click.option("--every", metavar="INTERVAL", help="As 30s, 5m or 1d.")
    cron = click.option("--cron", metavar="FIELDS", help='As "0 9 * * mon-fri".')
    return cron(every(tz(function)))


@click.group(cls=Group)
def recurring() -> None:
    """Recurring schedules.

    \b
    delaytasks recurring set nightly report.send --cron "0 2 * * *" --tz Europe/Berlin
    delaytasks recurring list
    """


@recurring.command("list")
@click.option("--tag", help="Only schedules of this tag.")
@click.option("--prefix", help="Only schedules whose name begins like this.")
@click.option("--after", metavar="NAME", help="Begin after this name.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="The most schedules to list.",
)
@pass_cli
def list_(cli: Cli, limit: int, **filters: str | None) -> None:
    """List schedules in the order of their names.

    Tasks are made before they are due. "tasks until" is the last occurrence that has its task.

    \b
    delaytasks recurring list --prefix eu-
    """
    found = cli.delays.recurring.list(**filters, limit=limit)
    if cli.is_json:
        print_json([schedule.as_json() for schedule in found])
        return
    if not found:
        cli.note("No recurring schedules.")
        return
    now = runtime_of(cli.delays).clock.certain_now()
    print_table(
        "name,tag,timing,zone,next occurrence,tasks until,last task,declared".split(","),
        [_row(schedule, now) for schedule in found],
        folded="name tag",
    )
    if len(found) == limit:
        cli.note(f"The next ones: --after {cell(found[-1].name)}")


@recurring.command("set")
@_name
@click.argument("tag")
@click.argument("body", default="null")
@_timing
@click.option("--start", type=INSTANT, help="The first occurrence, as 2030-01-31T18:00:00Z.")
@click.option("--jitter", metavar="DURATION", help="Each task is due up to this time later.")
@click.option("--missed", help="latest, all or skip: which missed occurrences run.")
@click.option("--most-missed", type=int, help="The most missed occurrences that run with all.")
@click.option("--overlap", help="allow, or skip while the last task has not ended.")
@click.option("--queue", help="The queue [the queue of the tag].")
@click.option("--priority", type=int, help="0 to 9; higher first.")
@click.option("--retries", help='A retry schedule, as "15s 3m".')
@click.option("--expires", metavar="DURATION", help="A task that starts later is cancelled.")
@click.option(
    "--meta",
    type=PAIR,
    multiple=True,
    metavar="NAME=VALUE",
    help="A pair of the meta of each task. Repeatable.",
)
@_actor_option
@pass_cli
def set_(cli: Cli, name: str, tag: str, body: str, actor: str | None, **given: Any) -> None:
    """Store a schedule, or replace the one of this name. The body is JSON; - reads it from stdin.

    \b
    delaytasks recurring set nightly report.send --cron "0 2 * * *" --tz Europe/Berlin
    delaytasks recurring set feeds feed.read '{"feed": 7}' --every 5m --overlap skip
    """
    cli.import_processors()
    given["meta"] = pairs_or(given["meta"])
    options = {option: value for option, value in given.items() if value is not None}
    _report(
        cli, cli.delays.recurring.set(name, tag, read_body(body), actor=actor, **options), "stored"
    )


@recurring.command()
@_name
@_actor_option
@pass_cli
def pause(cli: Cli, name: str, actor: str | None) -> None:
    """Make no more tasks of a schedule, and cancel those that wait for later occurrences.

    \b
    delaytasks recurring pause nightly --actor "ann, until the printer is repaired"
    """
    _report(cli, cli.delays.recurring.pause(name, actor=actor), "paused")


@recurring.command()
@_name
@_actor_option
@pass_cli
def resume(cli: Cli, name: str, actor: str | None) -> None:
    """Continue a schedule with its next occurrence.

    \b
    delaytasks recurring resume nightly
    """
    _report(cli, cli.delays.recurring.resume(name, actor=actor), "resumed")


@recurring.command()
@_name
@pass_cli
def run(cli: Cli, name: str) -> None:
    """Make one task of a schedule now. Its occurrences stay as they are.

    \b
    delaytasks recurring run nightly
    """
    task = cli.delays.recurring.run(name)
    cli.answer_task(task, "scheduled")
    cli.note_broker_away()


@recurring.command()
@_name
@_actor_option
@pass_cli
def remove(cli: Cli, name: str, actor: str | None) -> None:
    """Delete a schedule, and cancel its tasks that wait for later occurrences.

    \b
    delaytasks recurring remove nightly
    """
    removed = cli.delays.recurring.remove(name, actor=actor)
    _report(cli, removed, "removed")
    if removed.is_declared:
        cli.note("Workers whose code declares it add it again. To stop it, pause it.")


@recurring.command("next")
@click.argument("name", required=False)
@_timing
@click.option(
    "--count",
    "most",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="The number of occurrences.",
)
@click.option("--after", type=INSTANT, help="As 2030-01-31T18:00:00Z [now].")
@pass_cli
def next_(
    cli: Cli,
    name: str | None,
    cron: str | None,
    every: str | None,
    tz: str | None,
    most: int,
    after: datetime | None,
) -> None:
    """Show the next occurrences of a schedule, or of --cron or --every.

    \b
    delaytasks recurring next nightly
    delaytasks recurring next --cron "30 2 * * *" --tz Europe/Berlin --count 3
    """
    if (name is None) == (cron is None and every is None):
        raise click.UsageError("give the name of a schedule, or --cron or --every")
    since = after or runtime_of(cli.delays).clock.certain_now()
    if name is not None:
        schedule = cli.delays.recurring.get(name)
        zone, found = schedule.tz, schedule.next(most, since)
    else:
        zone = tz or default_tz(runtime_of(cli.delays))
        found = preview(cron, {"every": every, "tz": zone}, since, most)
    if cli.is_json:
        print_json([show_instant(at) for at in found])
        return
    for at in found:
        say(f"{show_instant(at)}  {_local(at, zone)}")


@recurring.command("import")
@click.argument("source", type=click.Choice([*SOURCES]))
@click.option("--dry-run", is_flag=True, help="Only show what would be stored.")
@pass_cli
def import_(cli: Cli, source: str, dry_run: bool) -> None:
    """Store the schedules of Celery beat, django-celery-beat or RedBeat. It can be repeated.

    \b
    delaytasks recurring import beat --dry-run
    delaytasks recurring import redbeat
    """
    cli.import_processors()
    found = [*import_entries(SOURCES[source](cli.app), runtime_of(cli.delays), dry_run)]
    if cli.is_json:
        print_json([entry._asdict() for entry in found])
    elif found:
        print_table(
            "name,Celery task,timing,result,problem".split(","),
            [
                (e.name, e.task, show_timing(e.timing or NOTHING), e.result, e.problem or NOTHING)
                for e in found
            ],
            folded="name problem",
        )
    refused = sum(entry.result == "refused" for entry in found)
    stored = len(found) - refused
    done = "would be stored" if dry_run else "are stored"
    cli.note(f"{count(stored, 'schedule')} {done}, and {refused} refused.")


# -- internals ------------------------------------------------------------------------------------


def _local(at: datetime, zone: str) -> str:
    return at.astimezone(zone_of(zone)).strftime("%a %Y-%m-%d %H:%M:%S %Z")


def _report(cli: Cli, schedule: RecurringSchedule, done: str) -> None:
    at = schedule.next_at
    following = "" if at is None or done == "removed" else f"; next occurrence {show_instant(at)}"
    cli.answer(
        schedule.as_json(),
        f"{done} recurring schedule {cell(schedule.name)} ({cell(schedule.tag)}){following}",
    )


def _next_occurrence(schedule: RecurringSchedule, now: datetime) -> Cell:
    """Return the next occurrence, which may have its task already."""
    if schedule.is_paused:
        return ("paused", "yellow")
    if schedule.next_at is not None and schedule.next_at <= now:
        return schedule.next_at  # no task was made in time
    try:
        found = schedule.next(1, now)
    except InvalidTimingError:  # another program has written the row
        return schedule.next_at
    return found[0] if found else "ended"


def _row(schedule: RecurringSchedule, now: datetime) -> list[Cell]:
    return [
        schedule.name,
        schedule.tag,
        show_timing(schedule.timing),
        schedule.tz,
        _next_occurrence(schedule, now),
        schedule.last_at,
        NOTHING if schedule.last_task_id is None else str(schedule.last_task_id),
        "yes" if schedule.is_declared else NOTHING,
    ]
