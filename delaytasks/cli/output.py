"""Print one JSON document, or text and tables in which untrusted text cannot do harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import click

from delaytasks.cli.table import LONGEST as LONGEST
from delaytasks.cli.table import NOTHING as NOTHING
from delaytasks.cli.table import Cell as Cell
from delaytasks.cli.table import cell as cell
from delaytasks.cli.table import print_table as print_table
from delaytasks.cli.times import show_from_now, show_instant
from delaytasks.core.errors import ConfigError, DelayTaskError, InvalidInputError
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, pretty
from delaytasks.core.text import count as count
from delaytasks.core.text import last_line, one_line

#: The key of click's `Context.meta` under which the root group notes whether --json is given.
WANTS_JSON = "delaytasks.json"
BAD, GOOD = "red", "green"
_STATUS_COLOURS = {
    "DONE": GOOD,
    "FAILED": BAD,
    "RUNNING": "cyan",
    "CANCELLED": "bright_black",
    "HELD": "yellow",
}


class Failure(click.ClickException):
    """An error of a command: one red line, or {"error": …, "type": …} where JSON is asked for."""

    exit_code: int  # type: ignore[misc]

    def __init__(
        self,
        error: DelayTaskError | click.UsageError,
        is_json: bool,
        details: str = "",
        rewrite: Callable[[str], str] = str,
    ) -> None:
        is_usage = isinstance(error, click.UsageError)
        text = error.format_message() if isinstance(error, click.UsageError) else str(error)
        super().__init__(rewrite(text))
        is_callers = is_usage or isinstance(error, (InvalidInputError, ConfigError))
        self.exit_code = 2 if is_callers else 1
        self._type = type(error).__name__
        self._is_json = is_json
        self._details = details

    def show(self, file: Any = None) -> None:
        if self._is_json:
            click.echo(json.dumps({"error": self.message, "type": self._type}), err=True)
            return
        if self._details:
            click.echo(self._details.rstrip(), err=True)
        click.secho(f"Error: {one_line(self.message, LONGEST)}", fg=BAD, err=True)


# -- JSON -----------------------------------------------------------------------------------------


def is_json(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(WANTS_JSON))


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def task_json(task: DelayTask) -> dict[str, Any]:
    """Return `DelayTask.as_json()`.

    The body stays text if another program wrote it and it cannot be expressed in JSON.
    """
    document = task.as_json()
    try:
        json.dumps(document["body"], allow_nan=False)
    except (ValueError, RecursionError):
        document["body"] = task.body_json
    return document


# -- text -----------------------------------------------------------------------------------------


def say(text: str, **style: Any) -> None:
    # click.secho would end even a plain line with a reset.
    click.echo(click.style(text, **style) if style else text)


def reason(error: str | None) -> str:
    """Return the line of a traceback that names the error."""
    return last_line(error, 80) or NOTHING


def block(text: str) -> str:
    """Return text of several lines, each indented and without control characters."""
    return "\n".join("  " + one_line(line, LONGEST) for line in text.rstrip("\n").split("\n"))


def pretty_body(task: DelayTask) -> str:
    return pretty(lambda: task.body, task.body_json)


def sentence(task: DelayTask, done: str, now: datetime) -> str:
    """Return, for example, "scheduled task 7 (mail): due 2030-01-31T18:00:00Z, in 1h"."""
    due, tag = task.due, cell(task.tag)
    return f"{done} task {task.id} ({tag}): due {show_instant(due)}, {show_from_now(due, now)}"


def coloured(status: Status) -> tuple[str, str]:
    return status.name, _STATUS_COLOURS.get(status.name, "")


def print_fields(fields: Iterable[tuple[str, Cell]]) -> None:
    """Print one line for each name and value."""
    pairs = list(fields)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        text, colour = value if isinstance(value, tuple) else (value, "")
        click.echo(f"{name:{width}}  {click.style(text, fg=colour) if colour else text}")
