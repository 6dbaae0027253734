"""`delaytasks schedule`, `recurring` and `import`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, TypeVar

import click

from delaytasks.cli.beat_imports import SOURCES, import_entries
from delaytasks.cli.context import Cli, Command, Group, moved_bar, pass_cli
from delaytasks.cli.options import command_of, parse_body, perform
from delaytasks.cli.output import NOTHING, Cell, cell, count, print_json, print_table, show_instant
from delaytasks.client import DelayTasks
from delaytasks.db import producer
from delaytasks.model.errors import DelayTaskError, InvalidInputError
from delaytasks.model.inputs import parse_duration, parse_instant
from delaytasks.model.task import NewTask, OnConflict
from delaytasks.operate.operations import OPERATIONS, Operation
from delaytasks.recurring.definition import RecurringSchedule
from delaytasks.recurring.timing import zone_of
from delaytasks.runtime import runtime_of

T = TypeVar("T")
_LINE_FIELDS = NewTask._fields
#: Options that the tasks of a file share.
_SHARED = ("queue", "priority", "on_conflict")


def _schedule(cli: Cli, operation: Operation, given: dict[str, Any], many: BinaryIO | None) -> None:
    if many is not None:
        if given.keys() - {*_SHARED}:
            raise click.UsageError(
                "With --many, only --queue, --priority and --on-conflict may be options; "
                "the file contains everything else."
            )
        _schedule_many(cli, many, **given)
        return
    if "tag" not in given:
        raise click.UsageError("Missing argument 'TAG'.")
    perform(cli, operation, given)


_many = click.Option(
    ["--many"], type=click.File("rb"), help="Schedule the tasks in this file (- for stdin)."
)
schedule = command_of("schedule", _schedule, [_many])
for _each in schedule.params:
    _each.required = False  # with --many, the lines of the file have the tags


# -- many -----------------------------------------------------------------------------------------


def _schedule_many(cli: Cli, file: BinaryIO, **shared: Any) -> None:
    cli.import_processors()
    scheduled, lines = 0, enumerate(file, 1)
    with moved_bar(cli, "scheduled") as progress:
        bar = progress.add_task("", total=_size(file), moved=0)
        while batch := [*islice(lines, producer.BULK)]:
            try:
                scheduled += _schedule_batch(cli.delays, batch, **shared)
            except DelayTaskError as error:
                first, last = batch[0][0], batch[-1][0]
                done = f"{count(scheduled, 'task')} scheduled, those before line {first}"
                if not isinstance(error, InvalidInputError):
                    done += f", and perhaps some of lines {first} to {last}"
                elif not scheduled:
                    done = "nothing was scheduled"
                error.args = (f"{error}; {done}", *error.args[1:])
                raise
            progress.update(bar, advance=sum(len(raw) for _, raw in batch), moved=scheduled)
    cli.answer({"scheduled": scheduled}, f"scheduled {count(scheduled, 'task')}")
    cli.note_broker_away()


def _schedule_batch(
    delays: DelayTasks,
    batch: list[tuple[int, bytes]],
    on_conflict: OnConflict = "reject",
    **defaults: Any,
) -> int:
    """Schedule the tasks of some numbered lines, all or none. Return the number of new tasks."""
    defaults["body"] = None
    tasks = {
        number: _at_line(number, partial(_task, raw, defaults))
        for number, raw in batch
        if raw.strip()
    }
    try:
        return delays.schedule_many(tasks.values(), on_conflict=on_conflict)
    except InvalidInputError:
        # A whole batch is checked before it is written: find the wrong task.
        build = runtime_of(delays).producer.build
        for number, task in tasks.items():
            _at_line(number, partial(build, [task], on_conflict))
        raise


def _at_line(number: int, make: Callable[[], T]) -> T:
    """Return the result of `make`. An error of the input names the line."""
    try:
        return make()
    except InvalidInputError as error:
        error.args = (f"line {number}: {error}", *error.args[1:])
        raise


def _task(raw: bytes, defaults: dict[str, Any]) -> NewTask:
    """Return the task of one line."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"the line is not UTF-8 ({error}); write JSON as UTF-8", "body"
        ) from None
    values = parse_body(text, "the line is not JSON", "write one object a line")
    if not isinstance(values, dict) or "tag" not in values:
        raise InvalidInputError(
            'not an object with a tag, as {"tag": "order.close", "delay": "30m"} is one', "tag"
        )
    for name in values:
        if name not in _LINE_FIELDS:
            close = difflib.get_close_matches(name, _LINE_FIELDS, n=1)
            known = f" (known: {', '.join(_LINE_FIELDS)})"
            hint = f"; did you mean {close[0]!r}?" if close else known
            raise InvalidInputError(f"a task has no field {name!r:.60}{hint}", name)
    delay, at = values.get("delay"), values.pop("at", None)
    if isinstance(delay, str):
        values["delay"] = parse_duration(delay)
    if at is not None and not isinstance(at, str):
        raise InvalidInputError(f"at is an instant in quotes, not {at!r:.40}", "at")
    instant = None if at is None else parse_instant(at)
    return NewTask(**{**defaults, **values, "at": instant})


def _size(file: BinaryIO) -> int | None:
    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:
        return None


# -- `recurring`: list, set, run and remove, and `import` -----------------------------------------


@click.group(cls=Group)
def recurring() -> None:
    """Recurring schedules. The commands `pause` and `resume` have --recurring NAME.

    \b
    delaytasks recurring set nightly report.send --cron "0 2 * * *" --tz Europe/Berlin
    delaytasks recurring list
    """


@recurring.command("list")
@click.argument("name", required=False)
@click.option("--next", "occurrences", type=click.IntRange(1, 1000), help="Occurrences of NAME.")
@click.option("--tag", help="Only schedules of this tag.")
@click.option("--after", metavar="NAME", help="Begin after this name.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, help="The most to list. [100]")
@pass_cli
def list_(cli: Cli, name: str | None, occurrences: int | None, limit: int, **page: Any) -> None:
    """List schedules in the order of their names, or the next occurrences of one.

    \b
    delaytasks recurring list
    delaytasks recurring list 'eu-*'
    delaytasks recurring list nightly --next 5

    Tasks are made before they are due. "tasks until" is the last occurrence that has its task.
    """
    now = cli.runtime.clock.certain_now()
    is_one = name is not None and not name.endswith("*")
    if occurrences is not None:
        if not is_one:
            raise click.UsageError("--next requires the NAME of a schedule")
        _print_occurrences(cli, cli.delays.recurring.get(str(name)), occurrences, now)
        return
    prefix = name.removesuffix("*") if name is not None else None
    found = (
        [cli.delays.recurring.get(str(name))]
        if is_one
        else cli.delays.recurring.list(prefix=prefix, limit=limit, **page)
    )
    if cli.is_json:
        print_json([schedule.as_json() for schedule in found])
        return
    if not found:
        cli.note("No recurring schedules.")
        return
    print_table(
        "name,tag,timing,zone,next occurrence,tasks until,last task,declared".split(","),
        [_row(schedule, now) for schedule in found],
        folded="name tag",
    )
    if len(found) == limit:
        cli.note(f"The next ones: --after {cell(found[-1].name)}")


def _print_occurrences(cli: Cli, schedule: RecurringSchedule, most: int, now: datetime) -> None:
    zone, found = zone_of(schedule.tz), schedule.next(most, now)
    local = [at.astimezone(zone).strftime("%a %Y-%m-%d %H:%M:%S %Z") for at in found]
    shown = [show_instant(at) for at in found]
    lines = [f"{at}  {here}" for at, here in zip(shown, local, strict=True)]
    cli.answer(shown, "\n".join(lines) or "No further occurrence.")


for _operation in OPERATIONS:
    if _operation.startswith("recurring "):
        recurring.add_command(command_of(_operation))


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
    found = [*import_entries(SOURCES[source](cli.app), runtime_of(cli.delays), dry_run)]
    if cli.is_json:
        print_json([entry._asdict() for entry in found])
    elif found:
        print_table(
            "name,Celery task,timing,result,problem".split(","),
            [(e.name, e.task, e.timing or NOTHING, e.result, e.problem or NOTHING) for e in found],
            folded="name problem",
        )
    refused = sum(entry.result == "refused" for entry in found)
    stored = len(found) - refused
    done = "would be stored" if dry_run else "are stored"
    cli.note(f"{count(stored, 'schedule')} {done}, and {refused} refused.")


# -- internals ------------------------------------------------------------------------------------


def _next_occurrence(schedule: RecurringSchedule, now: datetime) -> Cell:
    """Return the next occurrence, which may have its task already."""
    if schedule.is_paused:
        return ("paused", "yellow")
    if schedule.next_at is not None and schedule.next_at <= now:
        return schedule.next_at  # no task was made in time
    try:
        found = schedule.next(1, now)
    except InvalidInputError:  # another program has written the row
        return schedule.next_at
    return found[0] if found else "ended"


def _row(schedule: RecurringSchedule, now: datetime) -> list[Cell]:
    return [
        schedule.name,
        schedule.tag,
        schedule.timing,
        schedule.tz,
        _next_occurrence(schedule, now),
        schedule.last_at,
        NOTHING if schedule.last_task_id is None else str(schedule.last_task_id),
        "yes" if schedule.is_declared else NOTHING,
    ]
