"""How commands print: tables, documents, times, and texts that a terminal must not interpret.

A command answers with one JSON document or with parts: lines, coloured lines and tables. Untrusted
text passes through `cell`, which escapes control characters.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import click

from delaytasks.model.errors import ConfigError, DelayTaskError, InvalidInputError
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import one_line
from delaytasks.operate.texts import last_line, show_from_now, show_instant

#: Printed in a cell without a value, so that a script can count the columns of a piped table.
NOTHING = "-"
#: The longest text in a column whose cells may take several lines, and in another one.
LONGEST, LONGEST_CELL = 10_000, 200
BAD, GOOD, NOTED = "red", "green", "yellow"
#: A value, or (value, colour).
Cell = object
#: Spaces between two columns, and before a text on a line of its own below its row.
GAP, INDENT = 2, 4
#: The least width of a column whose cells may take several lines.
LEAST_FOLDED = 12
_PIPE_WIDTH = 1_000_000
_STATUS_COLOURS = {
    "DONE": GOOD,
    "FAILED": BAD,
    "RUNNING": "cyan",
    "CANCELLED": "bright_black",
    "HELD": NOTED,
}


class Table(NamedTuple):
    """A table. In a pipe, each row is one plain line with two or more spaces between columns.

    A terminal leaves out columns without any value, and prints long texts below their rows. If the
    rest is too wide, the terminal leaves out columns and then folds cells.

    Attributes
    ----------
    columns, rows
        The names of the columns, separated by commas, and the cells of each row. Columns of
        integers are aligned on the right.
    folded
        Columns whose cells may take several lines.
    extra
        Columns that a narrow terminal leaves out, in this order.
    below
        The column of long texts that a terminal prints below their rows.
    has_headings
        Whether the names of the columns are printed.
    """

    columns: str
    rows: Sequence[Sequence[Cell]]
    folded: str = ""
    extra: str = ""
    below: str = ""
    has_headings: bool = True


#: A line, (a line, its colour), or a table.
Part = str | tuple[str, str] | Table


def fields(pairs: Sequence[tuple[str, Cell]]) -> Table:
    """Return a table with one line for each name and value."""
    return Table("name,value", pairs, folded="value", has_headings=False)


def text_of(parts: Sequence[Part], is_terminal: bool | None = None) -> str:
    """Return the text of the parts. By default it is for stdout."""
    if is_terminal is None:
        is_terminal = sys.stdout.isatty()
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += _lines(part, is_terminal) if part.rows else []
        else:
            # click.style would end even a plain line with a reset.
            lines.append(
                click.style(part[0], fg=part[1] or None) if isinstance(part, tuple) else part
            )
    return "\n".join(lines)


def _lines(table: Table, is_terminal: bool) -> list[str]:
    """Return the lines of a table."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    names, folded = table.columns.split(","), table.folded.split(",")
    longest = [LONGEST if name in folded else LONGEST_CELL for name in names]
    rows = [
        [Text(*_shown(value, most)) for value, most in zip(row, longest, strict=True)]
        for row in table.rows
    ]
    widths = {
        name: max(len(name) * table.has_headings, *(row[n].cell_len for row in rows))
        for n, name in enumerate(names)
        if not (is_terminal and all(row[n].plain == NOTHING for row in rows))
    }
    width = Console().width if is_terminal else _PIPE_WIDTH
    if is_terminal:
        widths.pop(table.below, None)
        _fit(widths, folded, table.extra.split(","), width)
    is_right = [
        all(isinstance(row[n], int | None) for row in table.rows) for n in range(len(names))
    ]
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=width,
        highlight=False,
        legacy_windows=False,
    )
    kept = [n for n, name in enumerate(names) if name in widths]

    def grid(row: Sequence[Text]) -> Grid:
        found = Grid.grid(padding=(0, GAP, 0, 0))
        for n in kept:
            justify: Any = "right" if is_right[n] else "left"
            found.add_column(width=widths[names[n]], justify=justify, overflow="fold")
        found.add_row(*(row[n] for n in kept))
        return found

    with console.capture() as captured:
        if table.has_headings:
            console.print(grid([Text(name, "bold") for name in names]))
        for row in rows:
            console.print(grid(row))
            if is_terminal and table.below:
                text = row[names.index(table.below)]
                if text.plain != NOTHING:
                    console.print(Padding(text, (0, 0, 0, INDENT)))
    return re.sub(r" +$", "", captured.get(), flags=re.MULTILINE).splitlines()


def _fit(widths: dict[str, int], folded: Sequence[str], extra: Sequence[str], most: int) -> None:
    """Leave out extra columns, then narrow the widest folded column, until the table fits."""

    def is_too_wide() -> bool:
        return sum(widths.values()) + GAP * (len(widths) - 1) > most

    for name in extra:
        if is_too_wide():
            widths.pop(name, None)
    while is_too_wide():
        widest = max(folded, key=lambda name: widths.get(name, 0))
        if widths.get(widest, 0) <= LEAST_FOLDED:
            return
        widths[widest] -= 1


def _shown(value: Cell, longest: int) -> tuple[str, str]:
    """Return the text of a cell and its colour."""
    text, colour = value if isinstance(value, tuple) else (value, "")
    return cell(text, longest), colour


def cell(value: object, longest: int = LONGEST_CELL) -> str:
    """Return any value as one line without control characters."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, datetime):
        return show_instant(value)
    return f"{value:,}" if isinstance(value, int) else one_line(str(value), longest)


def plain(value: Any) -> Any:
    """Return a value as JSON has it. Named tuples become objects."""
    if isinstance(value, datetime):
        return show_instant(value)
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, frozenset):
        return sorted(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def reason(error: str | None) -> str:
    """Return the line of a traceback that names the error."""
    return last_line(error, 80) or NOTHING


def block(text: str) -> str:
    """Return text of several lines, each indented and without control characters."""
    return "\n".join("  " + one_line(line, LONGEST) for line in text.rstrip("\n").split("\n"))


def sentence(task: DelayedTask, done: str, now: datetime) -> str:
    """Return, for example, "scheduled task 7 (mail): due 2030-01-31T18:00:00Z, in 1h"."""
    due, tag = task.due, cell(task.tag)
    return f"{done} task {task.id} ({tag}): due {show_instant(due)}, {show_from_now(due, now)}"


def coloured(status: Status) -> tuple[str, str]:
    return status.name, _STATUS_COLOURS.get(status.name, "")


# -- Errors ---------------------------------------------------------------------------------------


#: The key of click's `Context.meta` under which the root group notes whether --json is given.
WANTS_JSON = "delaytasks.json"


def is_json(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(WANTS_JSON))


def kind_of(error: Exception) -> dict[str, str]:
    """Return what JSON says of an error besides its message."""
    kind = {"type": type(error).__name__}
    return kind | {"argument": error.argument} if isinstance(error, InvalidInputError) else kind


class Failure(click.ClickException):
    """An error of a command: one red line, or {"error": …, "type": …} if JSON is asked for."""

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
        self._kind = kind_of(error)
        self._is_json = is_json
        self._details = details

    def show(self, file: Any = None) -> None:
        if self._is_json:
            click.echo(json.dumps({"error": self.message, **self._kind}), err=True)
            return
        if self._details:
            click.echo(self._details.rstrip(), err=True)
        click.secho(f"Error: {one_line(self.message, LONGEST)}", fg=BAD, err=True)
