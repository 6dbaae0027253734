"""The commands on tasks: list, show, cancel, reschedule and rerun, and the log of bulk operations.

All of them take the same filters. A command that changes tasks moves them one by one if each of
them is named, by its id or by its tag and key. Otherwise it counts the tasks that match the
filters, asks the user, and moves them in steps.
"""

from __future__ import annotations

import functools
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, moved_bar, pass_cli, stopping_between_steps
from delaytasks.cli.output import (
    BAD,
    DURATION,
    GOOD,
    LONGEST,
    PAIR,
    PAST,
    RANGE,
    SHIFT,
    Cell,
    Failure,
    at_option,
    block,
    cell,
    coloured,
    count,
    delay_option,
    kind_of,
    pairs_or,
    print_fields,
    print_json,
    print_table,
    reason,
    say,
    sentence,
)
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import DelayTaskError, StoreError
from delaytasks.model.filters import Filter, filter_of
from delaytasks.model.inputs import check_id, show_duration, show_from_now
from delaytasks.model.moves import Status, moves_from
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import last_line, one_line, some_values
from delaytasks.operate.bulk_calls import BulkResult
from delaytasks.operate.explanations import Explanations
from delaytasks.operate.searches import Follower, changed_at
from delaytasks.operate.single_tasks import pretty_body
from delaytasks.operate.why import deferral_of

# -- Filters, which all commands share ------------------------------------------------------------


_STATUS = click.Choice([s.name for s in Status], case_sensitive=False)
FILTERS: dict[str, dict[str, Any]] = {
    "tag": {"help": "Of this tag."},
    "key": {"help": "With this key; 'eu-*' stands for all keys that begin with eu-."},
    "status": {"type": _STATUS, "multiple": True, "help": "Of this status. Repeatable."},
    "queue": {"help": "Of this queue."},
    "meta": {
        "type": PAIR,
        "multiple": True,
        "metavar": "NAME=VALUE",
        "help": "With this pair. Repeatable.",
    },
    "error": {
        "metavar": "PATTERN",
        "help": "Whose last error matches; * stands for any text, as '*timeout*'.",
    },
    "due": {
        "type": RANGE,
        "metavar": "A..B",
        "help": "Due from A until before B, as 2030-01-31T18:00:00Z, or 1h for an hour ago. "
        "Without A or B, the range has no such end.",
    },
    "created": {"type": RANGE, "metavar": "A..B", "help": "Scheduled in this range."},
    "updated_until": {"type": PAST, "help": "Not moved since this time."},
}
_FLAGS: dict[str, dict[str, Any]] = {
    "everything": {"is_flag": True, "help": "All tasks."},
    "dry_run": {"is_flag": True, "help": "Only count the tasks."},
    "yes": {"is_flag": True, "help": "Do not ask."},
}


@dataclass(frozen=True)
class Selection:
    """The tasks that the user names, by ids and filters, and how to change many of them."""

    ids: tuple[str, ...]
    given: dict[str, Any]
    everything: bool = False
    dry_run: bool = False
    yes: bool = False

    @property
    def filters(self) -> dict[str, Any]:
        """The ids and filters by their names in `model.filters.Filters`."""
        filters = {**self.given, **({"ids": self.ids} if self.ids else {})}
        for name, prefix in (("due", ""), ("created", "created_")):
            if name in filters:
                filters[f"{prefix}since"], filters[f"{prefix}until"] = filters.pop(name)
        if filters.get("key", "").endswith("*"):
            filters["key_prefix"] = filters.pop("key")[:-1]
        return filters

    def each(self, cli: Cli) -> Sequence[str] | None:
        """Return the ids of the tasks if each of them is named. Return None for filters."""
        if self.everything or self.dry_run:
            return None
        if self.filters.keys() == {"tag", "key"}:
            return [str(cli.get(None, **self.given).id)]
        if not self.ids and not self.given:
            raise click.UsageError("Name the tasks by ids or by filters.")
        return None if self.given else self.ids

    def as_typed(self) -> str:
        """Return the ids and filters as a part of a command line."""
        words = [*self.ids]
        for name, value in self.given.items():
            words += [f"--{name.replace('_', '-')} {shlex.quote(each)}" for each in _typed(value)]
        return " ".join(words)


def _typed(value: Any) -> list[str]:
    """Return the texts with which a user gives the value of a filter."""
    match value:
        case str():
            return [value]
        case datetime():
            return [value.isoformat()]
        case dict():
            return [f"{name}={text}" for name, text in value.items()]
        case (datetime() | None, datetime() | None):
            return ["..".join("" if end is None else end.isoformat() for end in value)]
        case _:
            return [*value]


def takes_filters(
    command: Callable[..., Any], flags: dict[str, dict[str, Any]] | None = None
) -> Callable[..., Any]:
    """Add ids and filters to a command, which receives a `Selection` as its argument `which`."""
    flags = flags or {}

    @functools.wraps(command)
    def with_filters(*args: Any, ids: tuple[str, ...], **options: Any) -> Any:
        given = {n: value for n in FILTERS if (value := pairs_or(options.pop(n))) is not None}
        chosen = {name: options.pop(name) for name in flags}
        return command(*args, which=Selection(ids, given, **chosen), **options)

    for name, attributes in reversed([*FILTERS.items(), *flags.items()]):
        with_filters = click.option(f"--{name.replace('_', '-')}", **attributes)(with_filters)
    return click.argument("ids", nargs=-1, metavar="[ID]...")(with_filters)


takes_many = functools.partial(takes_filters, flags=_FLAGS)


# -- `list`, and the changes that `list --follow` prints ------------------------------------------


#: Tasks on a page, and changes of the last minute with which `--follow` begins.
PAGE, LATELY = 100, 10
#: Seconds between two reads of `--follow`.
EVERY_S = 0.5
LONGEST_DETAIL = 300
#: The ids of tasks with short tags begin in the same column.
TAG_WIDTH = 16


@click.command("list", cls=Command)
@takes_filters
@click.option("--oldest-first", is_flag=True, help="Begin with the earliest due time.")
@click.option("--limit", type=int, help="The most tasks, 1 to 1000. [100; --follow: 10]")
@click.option("--cursor", help="Continue after the page that printed this cursor.")
@click.option("--follow", is_flag=True, help="Print the changes of tasks as they happen.")
@click.option("--for", "for_", type=DURATION, help="--follow: stop after this time.")
@pass_cli
def list_(
    cli: Cli,
    which: Selection,
    oldest_first: bool,
    limit: int | None,
    cursor: str | None,
    follow: bool,
    for_: timedelta | None,
) -> None:
    """List tasks in the order of their due times, the latest first.

    A task that no worker could run yet is listed at the time of its next try.

    \b
    delaytasks list --status FAILED --due 1h..
    delaytasks list --tag order.close --key 'order-7*' --limit 10
    delaytasks list --tag mail.send --status FAILED --follow

    With --follow, each line shows a task as it is after its change: scheduled, running, done,
    failed or cancelled. Of changes within half a second, only the last is shown. The first lines
    are changes of the last minute. Ctrl-C ends the command. With --json, each line is one document.
    """
    if follow:
        if oldest_first or cursor is not None:
            raise click.UsageError("--follow excludes --oldest-first and --cursor.")
        try:
            _follow(cli, filter_of(which.filters), LATELY if limit is None else limit, for_)
        except KeyboardInterrupt:
            pass  # the way to end this command
        return
    limit = PAGE if limit is None else limit
    page = cli.delays.find(
        **which.filters, limit=limit, cursor=cursor, newest_first=not oldest_first
    )
    if cli.is_json:
        print_json({"tasks": [task.as_json() for task in page], "cursor": page.cursor})
        return
    if not page.tasks:
        cli.note("No tasks.")
        return
    now = cli.runtime.clock.now()
    print_table(
        ("id", "status", "tag", "key", "when", "due", "queue", "attempts", "error"),
        [_row(task, now) for task in page],
        folded="tag key",
        extra="due queue attempts key",
        below="error",
    )
    if page.cursor is not None:
        words = [cli.command, "list", which.as_typed(), "--oldest-first" if oldest_first else ""]
        words += [f"--limit {limit} --cursor {page.cursor}"]
        # On stderr, so that a pipe receives tasks only.
        cli.note(f"More: {' '.join(filter(None, words))}")


def _row(task: DelayedTask, now: datetime) -> list[Cell]:
    return [
        str(task.id),
        coloured(task.status),
        task.tag,
        task.key,
        show_from_now(task.due, now),
        task.due,
        task.queue,
        task.runs,
        (reason(task.error), BAD),
    ]


def _follow(cli: Cli, where: Filter, most: int, for_: timedelta | None) -> None:
    ends_at = None if for_ is None else monotonic() + for_.total_seconds()
    follower, is_noted = Follower(cli.store, where), False
    step = follower.read()
    tasks = step.tasks[-most:] if most > 0 else []
    while True:
        now = cli.runtime.clock.now()
        for task in tasks:
            say(json.dumps(_change_json(task)) if cli.is_json else _change_line(task, now))
        if step.is_incomplete and not is_noted:
            cli.note("There are more changes than this command reads; it shows some of them.")
        is_noted = step.is_incomplete
        left_s = EVERY_S if ends_at is None else ends_at - monotonic()
        if left_s <= 0:
            return
        time.sleep(min(EVERY_S, left_s))
        step = follower.read()
        tasks = step.tasks


def _change_line(task: DelayedTask, now: datetime) -> str:
    status, colour = coloured(task.status)
    at = changed_at(task).strftime("%H:%M:%S.%f")[:-3]
    names = f"{click.style(f'{cell(task.tag):{TAG_WIDTH}}', bold=True)} {task.id}"
    if task.key is not None:
        names += f" {cell(task.key)}"
    shown = click.style(f"{status:12}", fg=colour or None)
    details = one_line(", ".join(_details(task, now)), LONGEST_DETAIL)
    return f"{click.style(at, dim=True)} {shown} {names}  {details}".rstrip()


def _change_json(task: DelayedTask) -> dict[str, Any]:
    """Return the JSON document of a change. It has no body and no result."""
    document = task.as_json()
    for name in ("body", "result", "headers"):
        del document[name]
    return {
        **document,
        "time": changed_at(task).isoformat(),
        "late_s": _late_s(task),
        "error": last_line(task.error) or None,
    }


def _details(task: DelayedTask, now: datetime) -> Iterator[str]:
    """Yield what the status of the task does not say."""
    error = last_line(task.error)
    if task.status in (Status.NOT_COMPLETE, Status.HELD):
        wait_s = (task.expected_time - now).total_seconds()
        due = f"in {show_duration(wait_s)}" if wait_s > 0 else "now"
        if deferral_of(task.error):
            yield f"deferred, next try {due}: {error}"
        elif task.runs and error:
            yield f"retry {task.runs} {due}: {error}"
        else:
            yield f"due {due}"
        return
    if task.status is Status.RUNNING:
        yield f"attempt {task.runs}"
        if task.worker:
            yield f"on {task.worker}"
    if (late_s := _late_s(task)) is not None:
        yield f"{show_duration(max(late_s, 0))} late"
    began, ended = task.execution_time, task.update_time
    if task.status in (Status.DONE, Status.FAILED) and began and ended:
        yield f"took {show_duration(max((ended - began).total_seconds(), 0))}"
    if error and task.is_finished:
        yield error


def _late_s(task: DelayedTask) -> float | None:
    """Return the lateness of the last run; None before it."""
    has_run = task.status in (Status.RUNNING, Status.DONE, Status.FAILED)
    if task.execution_time is None or not has_run:
        return None
    return round((task.execution_time - task.due).total_seconds(), 3)


# -- `show` ---------------------------------------------------------------------------------------


#: Fields that are times.
INSTANTS = ("due_time expected_time execution_time create_time update_time lease_until").split()
#: Fields that are in the first line, or below the others.
ELSEWHERE = ("id", "tag", "status", "body", "error")


@click.command(cls=Command)
@click.argument("id", required=False)
@click.option("--tag", help="With --key: the tag of the task.")
@click.option("--key", help="With --tag: the live task with this key, or else the last one.")
@pass_cli
def show(cli: Cli, id: str | None, tag: str | None, key: str | None) -> None:
    """Show why a task has not run, or how it ended, what to do about it, and then its fields.

    The first reason is the one that you can change first. With --json, the reasons are in `why`.

    \b
    delaytasks show 2305843009213693952
    delaytasks show --tag order.close --key order-7
    """
    task = cli.get(id, tag, key)
    attempts = cli.delays.get(task, attempts=True).attempts
    explanation = Explanations(cli.runtime).of(task)
    task = explanation.task or task
    reasons = [each._replace(remedy=cli.hints.rewrite(each.remedy)) for each in explanation.reasons]
    document = {**task.as_json(), "moves": moves_from(task.status)}
    if cli.is_json:
        why = [each.as_json() for each in reasons]
        print_json({**document, "why": why, "failed_attempts": [one.as_json() for one in attempts]})
        return
    status, colour = coloured(task.status)
    say(f"task {task.id} ({cell(task.tag)}): {click.style(status, fg=colour or None)}")
    for each in reasons:
        say(cell(each.sentence, LONGEST))
        if each.remedy:
            say(f"  → {cell(each.remedy, LONGEST)}", fg="yellow")
    say("")
    now = cli.runtime.clock.now()
    fields: list[tuple[str, Cell]] = []
    for name, value in document.items():
        if name == "moves":
            value = ", ".join(value)
        elif value is not None and name in INSTANTS:
            instant = task.due if name == "due_time" else getattr(task, name)
            value = f"{value} ({show_from_now(instant, now)})"
        if name not in ELSEWHERE:
            fields.append((name, cell(None if value is None else str(value), LONGEST)))
    print_fields(fields)
    say("body")
    say(block(pretty_body(task)))
    if task.error:
        say("error", fg=BAD)
        say(block(task.error))
    if attempts:
        say("failed attempts")
        print_table(
            ["attempt", "ended", "worker", "error"],
            [[one.number, one.ended, one.worker, reason(one.error)] for one in attempts],
        )


# -- `cancel`, `reschedule` and `rerun`: each task that is named, or many -------------------------


@click.command(cls=Command)
@takes_many
@click.option("--running", is_flag=True, help="Ask tasks that run to stop.")
@pass_cli
def cancel(cli: Cli, which: Selection, running: bool) -> None:
    """Cancel waiting tasks: by their ids, by tag and key, or many that match filters.

    \b
    delaytasks cancel 2305843009213693952 2305843009213693953
    delaytasks cancel --tag order.close --key order-7
    delaytasks cancel --tag newsletter.send --key 'eu-*' --dry-run

    It is no error if a named task was cancelled before. A task that runs, has ended or does not
    exist is reported, and the exit code is 1.
    """
    delays, ids = cli.delays, which.each(cli)
    if ids is None:
        if running:
            raise click.UsageError("--running is for tasks by id or by key.")
        _move_many(cli, "cancelled", which, delays.bulk.cancel)
        return

    def cancel_one(id: int) -> _Moved:
        result = delays.cancel(id, running=running)
        if result.error is not None:  # the exit code tells a script that the task may have run
            raise result.error
        done = "requested" if result.is_requested else "cancelled" if result else "unchanged"
        return done, str(id), f"cancelled task {id}" if result else result.reason

    _move_each(cli, ids, ("cancelled", "requested", "unchanged"), cancel_one)


@click.command(cls=Command)
@takes_many
@delay_option
@at_option
@click.option("--by", type=SHIFT, help="Many: this much later, or with a minus sign earlier.")
@click.option(
    "--jitter", type=DURATION, help="Many: up to this time later, so that a peak becomes flat."
)
@click.option("--version", type=int, help="Only if the task still has this version.")
@pass_cli
def reschedule(
    cli: Cli,
    which: Selection,
    delay: timedelta | None,
    at: datetime | None,
    by: timedelta | None,
    jitter: timedelta | None,
    version: int | None,
) -> None:
    """Give waiting tasks another time: by their ids, by tag and key, or many that match filters.

    \b
    delaytasks reschedule 2305843009213693952 --delay 2h
    delaytasks reschedule --queue reports --due ..2030-01-31T18:00:00Z --by 2h --dry-run
    delaytasks reschedule --tag mail.send --jitter 10m \\
        --due 2030-01-31T09:00:00Z..2030-01-31T09:01:00Z

    --jitter distributes the tasks uniformly. Overdue tasks are distributed from now on.
    """
    if [delay, at, by, jitter].count(None) != 3:
        raise click.UsageError("Give exactly one of --delay, --at, --by and --jitter.")
    is_shift = delay is None and at is None
    delays, ids = cli.delays, which.each(cli)
    if ids is None or is_shift:
        if version is not None:
            raise click.UsageError("--version is for tasks by id or by key.")
        move = functools.partial(delays.bulk.reschedule, delay, at=at, by=by, jitter=jitter)
        _move_many(cli, "rescheduled", which, move, is_shift)
        return

    def reschedule_one(id: int) -> _Moved:
        return _task(cli, "rescheduled", delays.reschedule(id, delay, at=at, version=version))

    _move_each(cli, ids, ["rescheduled"], reschedule_one)
    cli.note_broker_away()


@click.command(cls=Command)
@takes_many
@click.option("--delay", type=DURATION, help="Run after this time [now].")
@click.option("--entry", metavar="ID", help="Many: cancelled by this operation that `log` lists.")
@pass_cli
def rerun(cli: Cli, which: Selection, delay: timedelta | None, entry: str | None) -> None:
    """Run FAILED or CANCELLED tasks again: by their ids, or many FAILED ones that match filters.

    \b
    delaytasks rerun 2305843009213693952
    delaytasks rerun --tag pay.notify --due 2030-01-31T00:00:00Z.. --dry-run

    Filters match CANCELLED tasks only with --status CANCELLED. With --entry, tasks that have not
    moved since their cancel run at their own due times, unless --delay is given.
    """
    delays, ids = cli.delays, None if entry is not None else which.each(cli)
    if ids is None:
        move = functools.partial(delays.bulk.rerun, delay, entry=entry)
        _move_many(cli, "rerun", which, move)
        return

    def rerun_one(id: int) -> _Moved:
        return _task(cli, "rerun", delays.rerun(id, delay or 0))

    _move_each(cli, ids, ["rerun"], rerun_one)
    cli.note_broker_away()


#: The list of the JSON document that a task is added to, its value there, and a sentence.
_Moved = tuple[str, Any, str]


def _task(cli: Cli, done: str, task: DelayedTask) -> _Moved:
    return done, task.as_json(), sentence(task, done, cli.runtime.clock.now())


def _move_each(
    cli: Cli, ids: Sequence[str], lists: Sequence[str], move: Callable[[int], _Moved]
) -> None:
    """Call `move` for each id, even if another id fails. A text that is no id prevents all."""
    document: dict[str, list[Any]] = {name: [] for name in lists}
    failures: list[tuple[int, DelayTaskError]] = []
    for id in [check_id(text) for text in ids]:
        try:
            name, moved, text = move(id)
        except DelayTaskError as error:
            failures.append((id, error))
            if isinstance(error, StoreError):
                break  # the next id would wait as long, for the same answer
        else:
            document[name].append(moved)
            if not cli.is_json:
                say(text)
    if cli.is_json:
        failed = [
            {"id": str(id), "error": cli.hints.rewrite(str(error)), **kind_of(error)}
            for id, error in failures
        ]
        print_json({**document, "failed": failed})
    else:
        for _, earlier in failures[:-1]:
            Failure(earlier, False, rewrite=cli.hints.rewrite).show()
    if failures:
        raise failures[-1][1]


def _move_many(
    cli: Cli, done: str, which: Selection, move: Callable[..., BulkResult], is_shift: bool = False
) -> None:
    """Count the tasks, ask the user, and move them in steps.

    Parameters
    ----------
    done
        What `move` does to a task, as a participle: "cancelled".
    move
        A method such as `bulk.cancel`.
    is_shift
        Whether a second call would move the tasks again, so that it needs one more filter.
    """
    if not which.dry_run:
        cli.require_terminal(which.yes, "Count the tasks with --dry-run, then use --yes.")
    move = functools.partial(move, everything=which.everything, **which.filters)
    found = move(dry_run=True)
    would = f"{count(found.matched - found.refused, 'task')} would be {done}"
    if which.dry_run:
        _report(cli, found, would, "dry run")
        return
    running = f" (without {count(found.refused, 'running task')})" if found.refused else ""
    cli.confirm(which.yes, f"{would}{running}. Go on?")
    so_far = found

    def how_far() -> str:
        return f"{done} {so_far.changed:,} of {count(so_far.matched, 'task')}"

    with moved_bar(cli, done) as progress, stopping_between_steps() as check:
        bar = progress.add_task("", total=found.matched, moved=0)

        def on_progress(result: BulkResult) -> None:
            nonlocal so_far
            so_far = result
            completed = result.changed + result.refused
            progress.update(bar, total=result.matched, completed=completed, moved=result.changed)
            check()

        try:
            result = move(on_progress=on_progress)
        except KeyboardInterrupt:
            result = None
        except StoreError as error:
            error.args = (f"{error}; {how_far()}", *error.args[1:])
            raise
    if result is None:
        again = f", with --updated-until {found.started.isoformat()}" if is_shift else ""
        _report(cli, so_far, f"stopped: {how_far()}; to go on run it again{again}", "stopped")
        raise SystemExit(1)
    _report(cli, result, f"{done} {count(result.changed, 'task')}", "done")
    cli.note_broker_away()


def _report(cli: Cli, result: BulkResult, sentence: str, state: str) -> None:
    document = {
        "matched": result.matched,
        "changed": result.changed,
        "refused": result.refused,
        "state": state,
        "runs": [str(id) for id in result.runs],
    }
    cli.answer(document, sentence)
    if result.refused:
        moved = "they run or moved on, are locked, or another task has their key"
        why = "they run" if state == "dry run" else moved
        cli.note(f"left as they are: {count(result.refused, 'task')} ({why})")


# -- `log` ----------------------------------------------------------------------------------------


_STATE_COLOURS = {"done": GOOD, "failed": BAD, "stopped": "yellow", "running": "cyan"}


@click.command(cls=Command)
@click.option("--limit", type=int, default=20, show_default=True, help="1 to 1000.")
@pass_cli
def log(cli: Cli, limit: int) -> None:
    """List the operations on many tasks, the newest first: the actor, the filter and the counts.

    \b
    delaytasks log --limit 5

    If the process of an operation died, its state stays `running`, and its time of `seen` stops.
    """
    entries = cli.delays.bulk.log(limit=limit)
    if cli.is_json:
        print_json([entry.as_json() for entry in entries])
        return
    if not entries:
        cli.note("No operations yet.")
        return
    now = cli.runtime.clock.now()
    print_table(
        "id,started,actor,action,filter,state,seen,matched,changed,refused".split(","),
        [
            [
                str(entry.id),
                entry.started_at,
                entry.actor,
                entry.action,
                _filter_text(entry.filter),
                (entry.state, _STATE_COLOURS.get(entry.state, "")),
                show_from_now(entry.seen_at, now),
                entry.matched,
                entry.changed,
                entry.refused,
            ]
            for entry in entries
        ],
        folded="actor filter",
        extra="seen",
    )


def _filter_text(filter: dict[str, Any]) -> str:
    """Return a filter for the table, which has only the first of many ids. `--json` has all."""
    if "ids" in filter:
        filter = {**filter, "ids": some_values(filter["ids"])}
    return json.dumps(filter, ensure_ascii=False)
