"""The commands on tasks: list, show, cancel, reschedule and rerun.

All of them take the same filters. A command that changes tasks moves them one by one if each of
them is named, by its id or by its tag and key. Otherwise it counts the tasks that match the
filters, asks the user, and moves them in steps.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from inspect import cleandoc
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, moved_bar, pass_cli, stopping_between_steps
from delaytasks.cli.options import DURATION, PAST, RANGE, command_of, given_of, option_of
from delaytasks.cli.output import (
    BAD,
    LONGEST,
    Cell,
    Failure,
    block,
    cell,
    coloured,
    count,
    kind_of,
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
from delaytasks.model.task import CancelResult, DelayedTask
from delaytasks.model.text import last_line, one_line
from delaytasks.operate import operations
from delaytasks.operate.bulk_calls import BulkResult
from delaytasks.operate.operations import Operation
from delaytasks.operate.searches import Follower, changed_at
from delaytasks.operate.single_tasks import pretty_body
from delaytasks.operate.why import deferral_of, why

# -- Filters, which all commands share ------------------------------------------------------------


_OF_PYTHON = "ids key_prefix since until created_since created_until updated_until".split()
#: The filters that are typed as they are passed to `find`, and those with another form.
FILTERS = [each for each in operations.FILTERS if each.name not in _OF_PYTHON]
_RANGES: dict[str, Any] = {
    "due": (
        RANGE,
        "Due from A until before B, as 2030-01-31T18:00:00Z, or 1h for an hour ago. Without A or "
        "B, the range has no such end.",
    ),
    "created": (RANGE, "Scheduled in this range."),
    "updated_until": (PAST, "Not moved since this time."),
}
_FLAGS = {"everything": "All tasks.", "dry_run": "Only count the tasks.", "yes": "Do not ask."}


@dataclass(frozen=True)
class Selection:
    """The tasks that the user names, by ids and filters, and how to change many of them."""

    ids: tuple[str, ...]
    given: dict[str, Any]
    everything: bool = False
    dry_run: bool = False
    yes: bool = False

    @classmethod
    def of(cls, options: dict[str, Any]) -> Selection:
        """Take the values of `_filters` out of the options of a command."""
        given = given_of(FILTERS, options)
        ranges = {name: options.pop(name) for name in _RANGES}
        given.update({name: value for name, value in ranges.items() if value is not None})
        flags = {name: options.pop(name) for name in _FLAGS if name in options}
        return cls(options.pop("ids"), given, **flags)

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


def _filters(flags: Mapping[str, str] | None = None) -> list[click.Parameter]:
    """Return the ids, the filters and some flags of a command, which `Selection.of` takes."""
    return [
        click.Argument(["ids"], nargs=-1, metavar="[ID]..."),
        *map(option_of, FILTERS),
        *(click.Option([_flag(n)], type=kind, help=about) for n, (kind, about) in _RANGES.items()),
        *(click.Option([_flag(n)], is_flag=True, help=about) for n, about in (flags or {}).items()),
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# -- `list`, and the changes that `list --follow` prints ------------------------------------------


#: Tasks on a page, and changes of the last minute with which `--follow` begins.
PAGE, LATELY = 100, 10
#: Seconds between two reads of `--follow`.
EVERY_S = 0.5
LONGEST_DETAIL = 300
#: The ids of tasks with short tags begin in the same column.
TAG_WIDTH = 16


@pass_cli
def _list(
    cli: Cli,
    oldest_first: bool,
    limit: int | None,
    cursor: str | None,
    follow: bool,
    for_: timedelta | None,
    **options: Any,
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
    which = Selection.of(options)
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
        # On stderr, so that a pipe receives tasks only.
        cli.note(f"More: the same with --cursor {page.cursor}")


list_ = Command(
    "list",
    callback=_list,
    help=cleandoc(_list.__doc__ or ""),
    params=[
        *_filters(),
        click.Option(["--oldest-first"], is_flag=True, help="Begin with the earliest due time."),
        click.Option(["--limit"], type=int, help="The most tasks, 1 to 1000. [100; --follow: 10]"),
        click.Option(["--cursor"], help="Continue after the page that printed this cursor."),
        click.Option(["--follow"], is_flag=True, help="Print the changes of tasks as they happen."),
        click.Option(["--for", "for_"], type=DURATION, help="--follow: stop after this time."),
    ],
)


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
    reasons = [
        each._replace(remedy=cli.hints.rewrite(each.remedy)) for each in why(cli.runtime, task)
    ]
    document = {**task.as_json(), "moves": moves_from(task.status)}
    if cli.is_json:
        document["why"] = [each._asdict() for each in reasons]
        print_json({**document, "failed_attempts": [one.as_json() for one in attempts]})
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


#: Options for tasks by id or by key.
_OF_ONE = ("running", "version")
#: Options that move a task again if the command is repeated, so that it needs one more filter.
_SHIFTS = ("by", "jitter")


def _move(cli: Cli, operation: Operation, given: dict[str, Any], **options: Any) -> None:
    """Move each task that is named, or many."""
    which = Selection.of(options)
    is_many = any(each.name in given for each in operation.only_bulk)
    ids = None if is_many else which.each(cli)
    if ids is not None:
        if operation.name == "reschedule":  # a wrong time is one error, not one for each task
            cli.runtime.producer.due_of(given.get("delay"), given.get("at"))
        _move_each(cli, operation, ids, given)
        return
    for each in _OF_ONE:
        if each in given:
            raise click.UsageError(f"{_flag(each)} is for tasks by id or by key.")
    _move_many(cli, operation, which, given)


cancel = command_of("cancel", _move, _filters(_FLAGS))
reschedule = command_of("reschedule", _move, _filters(_FLAGS))
rerun = command_of("rerun", _move, _filters(_FLAGS))


def _moved(operation: Operation, id: int, result: Any, now: datetime) -> tuple[str, Any, str]:
    """Return the list of the JSON document, the value in it, and the sentence for one task."""
    if not isinstance(result, CancelResult):
        done = operation.done
        return done, result.as_json(), sentence(result, done, now)
    if result.error is not None:  # the exit code tells a script that the task may have run
        raise result.error
    done = "requested" if result.is_requested else "cancelled" if result else "unchanged"
    return done, str(id), f"cancelled task {id}" if result else result.reason


def _move_each(
    cli: Cli, operation: Operation, ids: Sequence[str], given: Mapping[str, Any]
) -> None:
    """Move each task, even if another one fails. A text that is no id prevents all."""
    done = ("cancelled", "requested", "unchanged")
    document: dict[str, list[Any]] = {
        name: [] for name in (done if operation.name == "cancel" else [operation.done])
    }
    failures: list[tuple[int, DelayTaskError]] = []
    for id in [check_id(text) for text in ids]:
        try:
            result = operation.call(cli.delays, task=id, **given)
            name, moved, text = _moved(operation, id, result, cli.runtime.clock.now())
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
    if operation.name != "cancel":
        cli.note_broker_away()


def _move_many(cli: Cli, operation: Operation, which: Selection, given: Mapping[str, Any]) -> None:
    """Count the tasks, ask the user, and move them in steps."""
    if not which.dry_run:
        cli.require_terminal(which.yes, "Count the tasks with --dry-run, then use --yes.")
    done, is_shift = operation.done, any(name in given for name in _SHIFTS)
    assert operation.bulk is not None
    filters = {**which.filters, "everything": which.everything}
    move = functools.partial(operation.bulk, cli.delays, **given, **filters)
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
