"""`list`, `show` and `why`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from delaytasks.cli.bulk import FILTERS, option_of
from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import (
    BAD,
    LONGEST,
    Cell,
    block,
    cell,
    coloured,
    pretty_body,
    print_fields,
    print_json,
    print_table,
    reason,
    say,
    task_json,
)
from delaytasks.cli.times import pairs_or, show_from_now
from delaytasks.core.states import moves_from
from delaytasks.core.task import DelayTask
from delaytasks.core.why import Explanation
from delaytasks.runtime import runtime_of

# -- list -----------------------------------------------------------------------------------------


def _takes_filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, attributes in reversed(FILTERS.items()):
        attributes = {**attributes, "help": f"Only tasks {attributes['help']}"}
        command = click.option(option_of(name), name, **attributes)(command)
    return command


@click.command("list", cls=Command)
@_takes_filters
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


def _row(task: DelayTask, now: datetime) -> list[Cell]:
    return [
        str(task.id),
        coloured(task.status),
        task.tag,
        task.key,
        show_from_now(task.due, now),
        task.due,
        task.queue,
        task.attempts,
        (reason(task.error), BAD),
    ]


# -- show -----------------------------------------------------------------------------------------

#: Fields that are times.
INSTANTS = ("due_time expected_time execution_time create_time update_time lease_until").split()


@click.command(cls=Command)
@click.argument("id", required=False)
@click.option("--tag", help="With --key: the tag of the task.")
@click.option("--key", help="With --tag: the live task with this key, or else the last one.")
@pass_cli
def show(cli: Cli, id: str | None, tag: str | None, key: str | None) -> None:
    """Show one task: its fields, body and error, its possible moves, and why it has not run.

    \b
    delaytasks show 2305843009213693952
    delaytasks show --tag order.close --key order-7
    """
    task = cli.get(id, tag, key)
    moves, document = moves_from(task.status), task_json(task)
    attempts = cli.delays.attempts(task)
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
@click.argument("id", required=False)
@click.option("--tag", help="With --key: the tag of the task.")
@click.option("--key", help="With --tag: the live task with this key, or else the last one.")
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
