"""What commands print: one JSON document, or text and tables in which strangers' text can do no harm."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import click

from delaytasks.cli.table import NOTHING as NOTHING
from delaytasks.cli.table import Cell as Cell
from delaytasks.cli.table import print_table as print_table
from delaytasks.cli.times import show_from_now, show_instant
from delaytasks.core.encryption import placeholder
from delaytasks.core.errors import (
    BodyEncryptedError,
    ConfigError,
    DelayTaskError,
    InvalidInputError,
)
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import last_line, one_line

LONGEST = 10_000
_COLOURS = {
    "DONE": "green",
    "FAILED": "red",
    "RUNNING": "cyan",
    "CANCELLED": "bright_black",
    "HELD": "yellow",
    "NOT_COMPLETE": "",
}


class Failure(click.ClickException):
    """An error as the command line tells it: one line in red, or {"error": …, "type": …}."""

    def __init__(
        self, error: DelayTaskError | click.UsageError, is_json: bool, details: str = ""
    ) -> None:
        super().__init__(
            error.format_message() if isinstance(error, click.UsageError) else str(error)
        )
        self._type = type(error).__name__
        self._is_json = is_json
        self._details = details

    def show(self, file: Any = None) -> None:
        if self._is_json:
            click.echo(json.dumps({"error": self.message, "type": self._type}), err=True)
            return
        if self._details:
            click.echo(self._details.rstrip(), err=True)
        click.secho(f"Error: {one_line(self.message, LONGEST)}", fg="red", err=True)


class Refusal(Failure):
    """The caller must write something else."""

    exit_code = 2


def failure_of(
    error: DelayTaskError | click.UsageError, is_json: bool, details: str = ""
) -> Failure:
    kind = (
        Refusal
        if isinstance(error, (InvalidInputError, ConfigError, click.UsageError))
        else Failure
    )
    return kind(error, is_json, details)


# -- JSON -----------------------------------------------------------------------------------------


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def task_json(task: DelayTask) -> dict[str, Any]:
    """As `DelayTask.as_json`; a body that another program wrote, and that JSON can not say, stays text."""
    document = task.as_json()
    try:
        json.dumps(document["body"], allow_nan=False)
    except (ValueError, RecursionError):
        document["body"] = task.body_json
    return document


# -- text -----------------------------------------------------------------------------------------


def say(text: str, **style: Any) -> None:
    # click would end even a plain line with a reset.
    click.echo(click.style(text, **style) if style else text)


def cell(value: object, longest: int = 200) -> str:
    """One line of any value."""
    return NOTHING if value is None or value == "" else one_line(str(value), longest)


def reason(error: str | None) -> str:
    """The line of a traceback that says what happened."""
    return last_line(error, 80) or NOTHING


def count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def block(text: str, indent: str = "  ") -> str:
    """Text of several lines, each of them made harmless."""
    return "\n".join(indent + one_line(line, LONGEST) for line in text.rstrip("\n").split("\n"))


def pretty_body(task: DelayTask) -> str:
    try:
        return json.dumps(task.body, indent=2, ensure_ascii=False)
    except BodyEncryptedError:
        return placeholder(task.body_json)
    except (ValueError, RecursionError):
        return task.body_json


def sentence(task: DelayTask, done: str, now: datetime) -> str:
    due = task.due
    return f"{done} task {task.id} ({cell(task.tag)}): due {show_instant(due)}, {show_from_now(due, now)}"


def coloured(status: Status) -> tuple[str, str]:
    return status.name, _COLOURS.get(status.name, "")


def print_fields(fields: Iterable[tuple[str, Cell]]) -> None:
    """name  value, one a line."""
    pairs = list(fields)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        text, colour = (value, "") if isinstance(value, str) else value
        click.echo(f"{name:{width}}  {click.style(text, fg=colour) if colour else text}")
