"""The commands on tasks: list, show, cancel, reschedule and rerun.

All of them take the same filters. A command that changes tasks moves them one by one if each of
them is named, by its id or by its tag and key. Otherwise it counts the tasks that match the
filters, asks the user, and moves them in steps.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.options import PAST, RANGE, command_of, flag_of, given_of, option_of
from delaytasks.cli.output import (
    BAD,
    LONGEST,
    NOTED,
    Failure,
    Made,
    Part,
    Table,
    block,
    cell,
    coloured,
    fields,
    kind_of,
    plain,
    reason,
    sentence,
)
from delaytasks.model.errors import DelayTaskError, StoreError, TaskNotFoundError
from delaytasks.model.filters import filter_of
from delaytasks.model.inputs import check_id, show_duration
from delaytasks.model.moves import WAITING, Status
from delaytasks.model.task import CancelResult, DelayedTask
from delaytasks.model.text import count, one_line
from delaytasks.operate import operations
from delaytasks.operate.operations import Operation, Parameter
from delaytasks.operate.state import changed_at
from delaytasks.operate.task_calls import BulkResult, pretty_body
from delaytasks.operate.texts import last_line, show_from_now
from delaytasks.operate.why import why

# -- Filters, which all commands share ------------------------------------------------------------


_OF_PYTHON = "ids key_prefix since until created_since created_until updated_until".split()
#: The filters, of which the last three have another form than those of `find`.
_FILTERS = [
    *(each for each in operations.FILTERS if each.name not in _OF_PYTHON),
    Parameter(
        "due",
        RANGE,
        "Due from A until before B, as 2030-01-31T18:00:00Z, or 1h for an hour ago. Without A or "
        "B, the range has no such end.",
    ),
    Parameter("created", RANGE, "Scheduled in this range."),
    Parameter("updated_until", PAST, "Not moved since this time."),
]
_filter_options = [click.Argument(["ids"], nargs=-1, metavar="[ID]..."), *map(option_of, _FILTERS)]


def _filters(options: dict[str, Any]) -> dict[str, Any]:
    """Take the filters out of the options of a command. They have the names of `find`."""
    filters = given_of(_FILTERS, options)
    for name, prefix in (("due", ""), ("created", "created_")):
        if name in filters:
            filters[f"{prefix}since"], filters[f"{prefix}until"] = filters.pop(name)
    if ids := options.pop("ids"):
        filters["ids"] = ids
    if filters.get("key", "").endswith("*"):
        filters["key_prefix"] = filters.pop("key")[:-1]
    return filters


def get(cli: Cli, id: str | None, tag: str | None, key: str | None) -> DelayedTask:
    """Read a task. If no live task has the key, read the last one that had it."""
    try:
        return cli.delays.get(id, tag=tag, key=key)
    except TaskNotFoundError:
        if tag is None or key is None:
            raise
        found = cli.delays.find(tag=tag, key=key, limit=100, newest_first=True).tasks
        if not found:
            raise TaskNotFoundError(f"no task of the tag {tag!r} has the key {key!r}") from None
        return max(found, key=lambda task: (task.create_time or task.expected_time, task.id))


# -- `list`, and the changes that `list --follow` prints ------------------------------------------


#: How long ago the tasks were due that `--follow` finds, the most tasks of each of its searches,
#: which read the bodies, too, and the most tasks of which it remembers what was printed.
LATELY, MOST_FOLLOWED, MOST_KNOWN = timedelta(minutes=1), 100, 2000
#: Seconds between two reads of `--follow`.
EVERY_S = 0.5
LONGEST_DETAIL = 300
#: The fields of a task that a followed change does not print: they may be long or confidential.
SECRETS = ("body", "result", "headers")
#: The ids of tasks with short tags begin in the same column.
TAG_WIDTH = 16


@click.command("list", cls=Command, params=[*_filter_options])
@click.option("--oldest-first", is_flag=True, help="Begin with the earliest due time.")
@click.option("--limit", default=100, show_default=True, help="The most tasks, 1 to 1000.")
@click.option("--cursor", help="Continue after the page that printed this cursor.")
@click.option("--follow", is_flag=True, help="Print tasks as they become due, run and end.")
@pass_cli
def list_(
    cli: Cli, oldest_first: bool, limit: int, cursor: str | None, follow: bool, **options: Any
) -> None:
    """List tasks in the order of their due times, the latest first.

    A task that no worker could run yet is listed at the time of its next try.

    \b
    delaytasks list --status FAILED --due 1h..
    delaytasks list --tag order.close --key 'order-7*' --limit 10
    delaytasks list --tag mail.send --status FAILED --follow

    With --follow, a line shows each task that runs or was due in the last minute, and further lines
    show its changes, until Ctrl-C. Of changes within half a second, only the last is shown, and of
    more than 100 tasks only those that were due last. Name ids to follow tasks that are due later.
    With --json, each line is one document, without the body and the result.
    """
    filters = _filters(options)
    if follow:
        if oldest_first or cursor is not None:
            raise click.UsageError("--follow excludes --oldest-first and --cursor.")
        with suppress(KeyboardInterrupt):  # the way to end this command
            _follow(cli, filters)
        return
    page = cli.delays.find(**filters, limit=limit, cursor=cursor, newest_first=not oldest_first)
    now = cli.runtime.clock.now()
    made: Made = {
        "id": lambda task: str(task.id),
        "status": lambda task: coloured(task.status.name),
        "when": lambda task: (
            None if task.status is Status.CANCELLED else show_from_now(task.due, now)
        ),
        "error": lambda task: (reason(task.error), BAD),
    }
    columns = "id,status,tag,key,when,due,queue,attempts=runs,error"
    looks = {"folded": "tag,key,error", "extra": "due,queue,attempts,key"}
    cli.answer(operations.document_of(page), Table.of(columns, page, made, **looks))
    # On stderr, so that a pipe receives tasks only.
    if not page.tasks:
        cli.note("No tasks.")
    elif page.cursor is not None:
        cli.note(f"More: the same with --cursor {page.cursor}")


def _follow(cli: Cli, filters: dict[str, Any]) -> None:
    """Print the tasks that have become due or run, and their changes."""
    wanted = filter_of(filters).status or Status
    filters = {**filters, "status": None}
    #: The version of each task that was found, and whether it was live then.
    known: dict[int, tuple[int, bool]] = {}
    while True:
        now = cli.runtime.clock.now()
        live = [id for id, (_, is_live) in known.items() if is_live]
        found = {task.id: task for task in _may_have_changed(cli, filters, live, now)}
        for task in sorted(found.values(), key=changed_at):
            before, _ = known.get(task.id, (None, False))
            known[task.id] = task.version, not task.is_finished
            if task.status not in wanted or before == task.version:
                continue
            if cli.is_json:
                document = task.as_json().items()
                cli.print_json({name: value for name, value in document if name not in SECRETS})
            else:
                click.echo(_change_line(task, now))
        known = dict([*known.items()][-MOST_KNOWN:])
        time.sleep(EVERY_S)


def _may_have_changed(
    cli: Cli, filters: dict[str, Any], live: Sequence[int], now: datetime
) -> Iterator[DelayedTask]:
    """Find tasks by their due times and ids, since no index leads to the time of a change."""
    find = functools.partial(cli.delays.find, limit=MOST_FOLLOWED, newest_first=True)
    if "ids" in filters:
        yield from find(**filters)
        return
    since, until = filters.get("since", now - LATELY), filters.get("until") or now
    yield from find(**{**filters, "since": since, "until": until})
    running = [task.id for task in find(status="RUNNING")]
    waiting = [id for id in live if id not in running]
    for ids in filter(None, (running, waiting[-MOST_FOLLOWED:])):
        yield from find(**{**filters, "ids": ids})


def _change_line(task: DelayedTask, now: datetime) -> str:
    """Return the time, the status and the names of the task, and further facts about the change."""
    status, colour = coloured(task.status.name)
    began, ended, facts = task.execution_time, task.update_time, []
    if task.status in WAITING:
        facts.append(f"due {show_from_now(max(task.expected_time, now), now)}")
    elif began is not None and task.status is not Status.CANCELLED:
        facts.append(f"{_seconds(task.due, began)} late")
        if task.is_finished and ended is not None:
            facts.append(f"took {_seconds(began, ended)}")
    if task.status is Status.RUNNING:
        facts.append(f"attempt {task.runs} on {task.worker}")
    at = click.style(changed_at(task).strftime("%H:%M:%S.%f")[:-3], dim=True)
    names = f"{click.style(f'{cell(task.tag):{TAG_WIDTH}}', bold=True)} {task.id}"
    key = "" if task.key is None else f" {cell(task.key)}"
    shown = click.style(f"{status:12}", fg=colour or None)
    details = one_line(", ".join(filter(None, [*facts, last_line(task.error)])), LONGEST_DETAIL)
    return f"{at} {shown} {names}{key}  {details}".rstrip()


def _seconds(start: datetime, end: datetime) -> str:
    return show_duration(max((end - start).total_seconds(), 0))


# -- `show` ---------------------------------------------------------------------------------------


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
    task = get(cli, id, tag, key)
    attempts = cli.delays.get(task, attempts=True).attempts
    reasons = [each._replace(remedy=cli.rewrite(each.remedy)) for each in why(cli.runtime, task)]
    document = task.as_json()
    status, colour = coloured(task.status.name)
    title = f"task {task.id} ({cell(task.tag)}): {click.style(status, fg=colour or None)}"
    parts: list[Part] = [title]
    for each in reasons:
        parts.append(cell(each.sentence, LONGEST))
        if each.remedy:
            parts.append((f"  → {cell(each.remedy, LONGEST)}", NOTED))
    now = cli.runtime.clock.now()
    shown = [name for name in document if name not in ELSEWHERE]
    parts += ["", fields([(name, _field(task, name, document[name], now)) for name in shown])]
    parts += ["body", block(pretty_body(task))]
    if task.error:
        parts += [("error", BAD), block(task.error)]
    if attempts:
        made = {"error": lambda one: reason(one.error)}
        columns = "attempt=number,ended,worker,error"
        parts += ["failed attempts", Table.of(columns, attempts, made)]
    failed = [one.as_json() for one in attempts]
    cli.answer({**document, "why": plain(reasons), "failed_attempts": failed}, *parts)


def _field(task: DelayedTask, name: str, value: Any, now: datetime) -> str | None:
    """Return the text of a field of the JSON document. A time also has its distance from now."""
    if value is not None and name.endswith(("_time", "_until")):
        instant = task.due if name == "due_time" else getattr(task, name)
        return f"{value} ({show_from_now(instant, now)})"
    return ", ".join(value) if name == "late_start" and value else value and str(value)


# -- Operations that move each task that is named, or many -----------------------------------------


_FLAGS = {"everything": "All tasks.", "dry_run": "Only count the tasks.", "yes": "Do not ask."}


def _move(
    cli: Cli,
    operation: Operation,
    given: dict[str, Any],
    everything: bool,
    dry_run: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Move each task that is named, or many."""
    filters = _filters(options)
    is_many = everything or dry_run or any(each.name in given for each in operation.only_bulk)
    if not is_many and filters.keys() == {"tag", "key"}:
        filters = {"ids": [str(get(cli, None, **filters).id)]}
    if not is_many and filters.keys() <= {"ids"}:
        if not filters:
            raise click.UsageError("Name the tasks by ids or by filters.")
        _move_each(cli, operation, filters["ids"], given)
        return
    for name in ("running", "version"):
        if name in given:
            raise click.UsageError(f"{flag_of(name)} is for tasks by id or by key.")
    _move_many(cli, operation, given, {**filters, "everything": everything}, dry_run, yes)


@functools.cache
def move_command(name: str) -> Command:
    flags = [click.Option([flag_of(n)], is_flag=True, help=help) for n, help in _FLAGS.items()]
    return command_of(name, _move, (*_filter_options, *flags))


def _move_each(
    cli: Cli, operation: Operation, ids: Sequence[str], given: Mapping[str, Any]
) -> None:
    """Move each task, even if another one fails. A text that is no id prevents all."""
    if operation.name == "reschedule":  # a wrong time is one error, not one for each task
        cli.runtime.producer.due_of(given.get("delay"), given.get("at"))
    is_cancel = operation.name == "cancel"
    names = ("cancelled", "requested", "unchanged") if is_cancel else (operation.done,)
    document: dict[str, list[Any]] = {name: [] for name in names}
    lines: list[str] = []
    failures: list[tuple[int, DelayTaskError]] = []
    for id in [check_id(text) for text in ids]:
        try:
            result = operation.call(cli.delays, task=id, **given)
            name, moved, line = _moved(operation, id, result, cli.runtime.clock.now())
        except DelayTaskError as error:
            failures.append((id, error))
            if isinstance(error, StoreError):
                break  # the next id would wait as long, for the same answer
        else:
            document[name].append(moved)
            lines.append(line)
    document["failed"] = [
        {"id": str(id), "error": cli.rewrite(str(error)), **kind_of(error)}
        for id, error in failures
    ]
    cli.answer(document, *lines)
    for _, earlier in failures[:-1] if not cli.is_json else ():
        Failure(earlier, False, rewrite=cli.rewrite).show()
    if failures:
        raise failures[-1][1]


def _moved(operation: Operation, id: int, result: Any, now: datetime) -> tuple[str, Any, str]:
    """Return the list of the JSON document, the value in it, and the sentence for one task."""
    if not isinstance(result, CancelResult):
        done = operation.done
        return done, result.as_json(), sentence(result, done, now)
    if result.error is not None:  # the exit code tells a script that the task may have run
        raise result.error
    done = "requested" if result.is_requested else "cancelled" if result else "unchanged"
    return done, str(id), f"cancelled task {id}" if result else result.reason


def _move_many(
    cli: Cli,
    operation: Operation,
    given: Mapping[str, Any],
    filters: Mapping[str, Any],
    is_dry_run: bool,
    is_confirmed: bool,
) -> None:
    """Count the tasks, ask the user, and move them in steps."""
    assert operation.bulk is not None
    done, move = operation.done, functools.partial(operation.bulk, cli.delays, **given, **filters)
    so_far = move(dry_run=True)
    would = f"{count(so_far.matched - so_far.refused, 'task')} would be {done}"
    if is_dry_run:
        _report(cli, so_far, would, "dry run")
        return
    running = f" (without {count(so_far.refused, 'running task')})" if so_far.refused else ""
    without_terminal = "Count the tasks with --dry-run, then use --yes."
    cli.confirm(is_confirmed, f"{would}{running}. Go on?", without_terminal)

    def how_far() -> str:
        return f"{done} {so_far.changed:,} of {count(so_far.matched, 'task')}"

    is_hidden = cli.is_json or not sys.stderr.isatty()
    bar = click.progressbar(
        length=so_far.matched, label=done, show_pos=True, file=sys.stderr, hidden=is_hidden
    )

    def on_progress(result: BulkResult) -> None:
        nonlocal so_far
        so_far, bar.length = result, result.matched
        bar.update(result.changed + result.refused - bar.pos)

    try:
        with bar:
            result = move(on_progress=on_progress)
    except StoreError as error:
        error.args = (f"{error}; {how_far()}", *error.args[1:])
        raise
    except KeyboardInterrupt:
        is_shift = not given.keys().isdisjoint({"by", "jitter"})  # it would move them once more
        again = f", with --updated-until {so_far.started.isoformat()}" if is_shift else ""
        _report(cli, so_far, f"stopped: {how_far()}; to go on run it again{again}", "stopped")
        raise SystemExit(1) from None
    _report(cli, result, f"{done} {count(result.changed, 'task')}", "done")


def _report(cli: Cli, result: BulkResult, sentence: str, state: str) -> None:
    counts = {name: getattr(result, name) for name in ("matched", "changed", "refused")}
    cli.answer({**counts, "state": state, "runs": [*map(str, result.runs)]}, sentence)
    if result.refused:
        moved = "they run or moved on, are locked, or another task has their key"
        why = "they run" if state == "dry run" else moved
        cli.note(f"left as they are: {count(result.refused, 'task')} ({why})")
