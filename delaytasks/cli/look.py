"""Commands that show tasks: list, show, why and tail."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import (
    BAD,
    DURATION,
    LONGEST,
    Cell,
    block,
    cell,
    coloured,
    pairs_or,
    pretty_body,
    print_fields,
    print_json,
    print_table,
    reason,
    say,
    show_from_now,
    task_json,
)
from delaytasks.cli.task_commands import FILTERS, option_of
from delaytasks.core.clock import monotonic
from delaytasks.core.filters import filter_of
from delaytasks.core.inputs import show_duration
from delaytasks.core.states import Status, moves_from
from delaytasks.core.task import DelayedTask
from delaytasks.core.text import last_line, one_line
from delaytasks.core.why import Explanation, deferral_of
from delaytasks.operations.explanations import Follower, FollowStep, changed_at
from delaytasks.runtime import runtime_of

# -- list -----------------------------------------------------------------------------------------


def _takes_filters(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            attributes = {**FILTERS[name], "help": f"Only tasks {FILTERS[name]['help']}"}
            command = click.option(option_of(name), name, **attributes)(command)
        return command

    return add


@click.command("list", cls=Command)
@_takes_filters(*FILTERS)
@click.option("--key", help="Only tasks with this key.")
@click.option("--oldest-first", is_flag=True, help="Begin with the earliest due time.")
@click.option("--limit", type=int, default=100, show_default=True, help="1 to 1000.")
@click.option("--cursor", help="Continue after the page that printed this cursor.")
@pass_cli
def list_(cli: Cli, oldest_first: bool, limit: int, cursor: str | None, **filters: Any) -> None:
    """List tasks in the order of their due times, the latest first.

    A task that no worker could run yet is listed at the time of its next try.

    \b
    delaytasks list --status FAILED --since 1h
    """
    given = {name: pairs_or(value) for name, value in filters.items() if value}
    page = cli.delays.find(**given, limit=limit, cursor=cursor, newest_first=not oldest_first)
    if cli.is_json:
        tasks = [task_json(task) for task in page]
        print_json({"tasks": tasks, "cursor": page.cursor})
        return
    if not page.tasks:
        cli.note("No tasks.")
        return
    now = runtime_of(cli.delays).clock.now()
    print_table(
        ("id", "status", "tag", "key", "when", "due", "queue", "attempts", "error"),
        [_row(task, now) for task in page],
        folded="tag key",
        extra="due queue attempts key",
        below="error",
    )
    if page.cursor is not None:
        words = [cli.command, "list"]
        for name, value in given.items():
            for each in _typed(value):
                words.append(f"{option_of(name)} {shlex.quote(each)}")
        words += ["--oldest-first"] if oldest_first else []
        # On stderr, so that a pipe receives tasks only.
        cli.note(f"More: {' '.join(words)} --limit {limit} --cursor {page.cursor}")


def _typed(value: Any) -> list[str]:
    """Return the texts with which a user gives the value of a filter."""
    if isinstance(value, datetime):
        return [value.isoformat()]
    if isinstance(value, dict):
        return [f"{name}={text}" for name, text in value.items()]
    return [value] if isinstance(value, str) else list(value)


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


# -- show -----------------------------------------------------------------------------------------


def _names_a_task(command: Callable[..., Any]) -> Callable[..., Any]:
    id = click.argument("id", required=False)
    tag = click.option("--tag", help="With --key: the tag of the task.")
    key = click.option(
        "--key", help="With --tag: the live task with this key, or else the last one."
    )
    return id(tag(key(command)))


#: Fields that are times.
INSTANTS = ("due_time expected_time execution_time create_time update_time lease_until").split()


@click.command(cls=Command)
@_names_a_task
@pass_cli
def show(cli: Cli, id: str | None, tag: str | None, key: str | None) -> None:
    """Show one task: its fields, body and error, its possible moves, and why it has not run.

    \b
    delaytasks show 2305843009213693952
    delaytasks show --tag order.close --key order-7
    """
    task = cli.get(id, tag, key)
    moves, document = moves_from(task.status), task_json(task)
    attempts = cli.delays.get(task, attempts=True).attempts
    explanation = cli.explain(task)
    if cli.is_json:
        failed_attempts = [one.as_json() for one in attempts]
        reasons = explanation.as_json()["reasons"]
        print_json({**document, "moves": moves, "why": reasons, "failed_attempts": failed_attempts})
        return
    now = runtime_of(cli.delays).clock.now()
    shown: list[tuple[str, Cell]] = [("id", str(task.id)), ("status", coloured(task.status))]
    for name, value in document.items():
        if name not in ("id", "status", "body", "error"):
            if value is not None and name in INSTANTS:
                instant = task.due if name == "due_time" else getattr(task, name)
                value = f"{value} ({show_from_now(instant, now)})"
            shown.append((name, value))
    shown.append(("moves", ", ".join(moves)))
    shown += [
        ("" if number else "why", each.text) for number, each in enumerate(explanation.reasons)
    ]
    print_fields((name, v if isinstance(v, tuple) else _field(v)) for name, v in shown)
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


def _field(value: object) -> str:
    return cell(None if value is None else str(value), LONGEST)


@click.command(cls=Command)
@_names_a_task
@pass_cli
def why(cli: Cli, id: str | None, tag: str | None, key: str | None) -> None:
    """Explain why a task has not run yet, or how it ended, and what to do about it.

    The first reason is the one that you can change first. With --json, each reason has a code, a
    sentence, a remedy and its facts.

    \b
    delaytasks why 2305843009213693952
    delaytasks why --tag order.close --key order-7
    """
    explanation = cli.explain(id, tag, key)
    if cli.is_json:
        print_json(explanation.as_json())
    else:
        _print_reasons(explanation)
    if explanation.task is None:
        sys.exit(1)


def _print_reasons(explanation: Explanation) -> None:
    task = explanation.task
    if task is not None:
        status, colour = coloured(task.status)
        name = click.style(status, fg=colour) if colour else status
        say(f"task {task.id} ({cell(task.tag)}): {name}")
    for each in explanation.reasons:
        say(cell(each.sentence, LONGEST))
        if each.remedy:
            say(f"  → {cell(each.remedy, LONGEST)}", fg="yellow")


# -- `tail`: follows the changes of tasks ---------------------------------------------------------


#: Filters of this command. Times are left out, since it shows what happens now.
_TAIL_FILTERS = "tag queue key_prefix status meta".split()
LONGEST_DETAIL = 300
#: The ids of tasks with short tags begin in the same column.
TAG_WIDTH = 16


@click.command(cls=Command)
@_takes_filters(*_TAIL_FILTERS)
@click.option("--key", help="Only tasks with this key. All changes of them are found.")
@click.option(
    "--lines",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="First show up to N changes of the last minute.",
)
@click.option(
    "--every", type=DURATION, default="500ms", show_default=True, help="The time between two reads."
)
@click.option("--for", "for_", type=DURATION, help="Stop after this time.")
@pass_cli
def tail(cli: Cli, lines: int, every: timedelta, for_: timedelta | None, **filters: Any) -> None:
    """Follow the changes of tasks: scheduled, running, done, failed, cancelled. Ctrl-C ends it.

    Each line shows a task as it is after its change. Of changes within the time between two reads,
    only the last is shown. With --json, each line is one JSON document.

    \b
    delaytasks tail --tag mail.send --status FAILED
    delaytasks tail --meta tenant=acme --json
    """
    given = {name: pairs_or(value) for name, value in filters.items() if value}
    follower = Follower(cli.store, filter_of(given))
    ends_at = None if for_ is None else monotonic() + for_.total_seconds()
    try:
        step = follower.read()
        first = step._replace(tasks=step.tasks[len(step.tasks) - min(lines, len(step.tasks)) :])
        _Printer(cli).print_until(ends_at, first, follower, every.total_seconds())
    except KeyboardInterrupt:
        pass  # the way to end this command


class _Printer:
    def __init__(self, cli: Cli) -> None:
        self._cli = cli
        self._clock = runtime_of(cli.delays).clock
        self._is_incomplete = False

    def print_until(
        self, ends_at: float | None, step: FollowStep, follower: Follower, every_s: float
    ) -> None:
        while True:
            self._print(step)
            left_s = every_s if ends_at is None else ends_at - monotonic()
            if left_s <= 0:
                return
            time.sleep(min(every_s, left_s))
            step = follower.read()

    def _print(self, step: FollowStep) -> None:
        for task in step.tasks:
            if self._cli.is_json:
                click.echo(json.dumps(document_of(task)))
            else:
                say(self._line(task))
        if step.is_incomplete and not self._is_incomplete:
            self._cli.note("There are more changes than tail reads; it shows some of them.")
        self._is_incomplete = step.is_incomplete

    def _line(self, task: DelayedTask) -> str:
        status, colour = coloured(task.status)
        at = changed_at(task).strftime("%H:%M:%S.%f")[:-3]
        detail = one_line(detail_of(task, self._clock.now()), LONGEST_DETAIL)
        names = f"{click.style(f'{cell(task.tag):{TAG_WIDTH}}', bold=True)} {task.id}"
        if task.key is not None:
            names += f" {cell(task.key)}"
        shown = click.style(f"{status:12}", fg=colour or None)
        return f"{click.style(at, dim=True)} {shown} {names}  {detail}".rstrip()


def document_of(task: DelayedTask) -> dict[str, Any]:
    """Return the JSON document of a change. It has no body and no result."""
    document = task.as_json()
    for name in ("body", "result", "headers"):
        del document[name]
    error = last_line(task.error) or None
    return {
        **document,
        "time": changed_at(task).isoformat(),
        "late_s": _late_s(task),
        "error": error,
    }


def detail_of(task: DelayedTask, now: Any) -> str:
    """Return what the status of the task does not say."""
    return ", ".join(_details(task, now))


def _details(task: DelayedTask, now: Any) -> Iterator[str]:
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
