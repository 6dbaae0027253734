"""How commands print: tables, documents, times, and texts that a terminal must not interpret."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from delaytasks.model.errors import ConfigError, DelayTaskError, InvalidInputError
from delaytasks.model.inputs import show_from_now
from delaytasks.model.inputs import show_instant as show_instant
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import count as count
from delaytasks.model.text import last_line, one_line

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


#: Printed in a cell without a value, so that a script can count the columns of a piped table.
NOTHING = "-"
#: The longest text in a column whose cells may take several lines.
LONGEST = 10_000
#: A value, or (value, colour).
Cell = object
#: Spaces between two columns.
GAP = 2
#: The least width of a column whose cells may take several lines.
LEAST_FOLDED = 12
#: Spaces before a text on a line of its own below its row.
INDENT = 4
_PIPE_WIDTH = 1_000_000


def cell(value: object, longest: int = 200) -> str:
    """Return any value as one line without control characters."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, datetime):
        return show_instant(value)
    return f"{value:,}" if isinstance(value, int) else one_line(str(value), longest)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    right: Sequence[str] = (),
    folded: str = "",
    extra: str = "",
    below: str = "",
) -> None:
    """Print a table. In a pipe, each row is one plain line with two or more spaces between columns.

    A terminal leaves out columns without any value, and prints long texts below their rows. If the
    rest is too wide, the terminal leaves out columns and then folds cells.

    Parameters
    ----------
    headings, rows
        The names of the columns, and the cells of each row.
    right
        Columns that are aligned on the right, as columns of integers are.
    folded
        Columns whose cells may take several lines, separated by spaces.
    extra
        Columns that a narrow terminal leaves out, in this order.
    below
        The column of long texts that a terminal prints below their rows.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    most = [LONGEST if name in folded.split() else 200 for name in headings]
    texts = [list(map(_text, row, most)) for row in rows]
    is_right = {
        name: name in right or all(isinstance(row[n], int | None) for row in rows)
        for n, name in enumerate(headings)
    }
    is_terminal = sys.stdout.isatty()
    total = Console().width if is_terminal else _PIPE_WIDTH
    widths = {
        name: max([len(name), *(row[n].cell_len for row in texts)])
        for n, name in enumerate(headings)
        if not (is_terminal and texts and all(row[n].plain == NOTHING for row in texts))
    }
    if is_terminal:
        widths.pop(below, None)
        _fit(widths, folded.split(), extra.split(), total)
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=total,
        highlight=False,
        legacy_windows=False,
    )
    columns = {headings.index(name): (width, is_right[name]) for name, width in widths.items()}
    with console.capture() as captured:
        console.print(_grid(columns, [[Text(name, "bold") for name in headings]]))
        if is_terminal:
            console.print("─" * min(_needed(widths), total))
        if is_terminal and below:
            for row in texts:
                console.print(_grid(columns, [row]))
                if (text := row[headings.index(below)]).plain != NOTHING:
                    console.print(Padding(text, (0, 0, 0, INDENT)))
        else:
            console.print(_grid(columns, texts))
    click.echo(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE), nl=False)


def _text(value: Cell, longest: int) -> Text:
    """Return text that is printed as it is, without markup and emoji codes."""
    from rich.text import Text

    if isinstance(value, tuple):
        return Text(cell(value[0], longest), value[1])
    return Text(cell(value, longest))


def _grid(columns: Mapping[int, tuple[int, bool]], rows: Sequence[Sequence[Text]]) -> Table:
    """Return a table of the columns with these indexes: (width, is it aligned on the right)."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=False)
    for width, is_right in columns.values():
        table.add_column(width=width, justify="right" if is_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row[index] for index in columns))
    return table


def _fit(widths: dict[str, int], folded: Sequence[str], extra: Sequence[str], total: int) -> None:
    """Leave out extra columns, then narrow the widest folded column, until the table fits."""
    for name in extra:
        if _needed(widths) > total:
            widths.pop(name, None)
    folded = [name for name in folded if name in widths]
    while folded and _needed(widths) > total:
        widest = max(folded, key=lambda name: widths[name])
        if widths[widest] <= LEAST_FOLDED:
            return
        widths[widest] -= 1


def _needed(widths: dict[str, int]) -> int:
    return sum(widths.values()) + GAP * max(len(widths) - 1, 0)


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


# -- JSON -----------------------------------------------------------------------------------------


def is_json(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(WANTS_JSON))


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, allow_nan=False))


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


def sentence(task: DelayedTask, done: str, now: datetime) -> str:
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
