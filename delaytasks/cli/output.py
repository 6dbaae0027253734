"""How commands print: tables, documents, times, and texts that a terminal must not interpret.

A command answers with one JSON document or with parts: lines, coloured lines and tables. Untrusted
text passes through `cell`, which escapes control characters. `Table.of` makes a table of the same
objects as the document.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import click

from delaytasks.model.errors import ConfigError, InvalidInputError
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import one_line
from delaytasks.operate.texts import last_line, show_from_now, show_instant, show_measured

#: Printed in a cell without a value, so that a script can count the columns of a piped table.
NOTHING = "-"
#: The longest text in a column whose cells may take several lines, and in another one.
LONGEST, LONGEST_FOLDED, LONGEST_CELL = 10_000, 1_000, 200
BAD, GOOD, NOTED = "red", "green", "yellow"
#: A value, or (value, colour).
Cell = object
#: Functions that make the cells of columns, by the names of these.
Made = Mapping[str, Callable[[Any], Cell]]
#: Spaces between two columns, and the width to which long texts are folded before columns are left
#: out.
GAP, FOLDED_WIDTH = 2, 24
_PIPE_WIDTH = 1_000_000
#: The colours of the statuses of tasks, and of the states of operations on many tasks.
_COLOURS = {
    "DONE": GOOD,
    "FAILED": BAD,
    "RUNNING": "cyan",
    "CANCELLED": "bright_black",
    "HELD": NOTED,
    "STOPPED": NOTED,
}


class Table(NamedTuple):
    """A table. In a pipe, each row is one plain line with two or more spaces between columns.

    A terminal leaves out columns without any value. If the rest is too wide, the terminal leaves
    out more columns and then folds cells.

    Attributes
    ----------
    columns, rows
        The names of the columns, separated by commas, and the cells of each row. Columns of
        integers are aligned on the right.
    folded
        Columns whose cells may take several lines.
    extra
        Columns that a narrow terminal leaves out, in this order.
    has_headings
        Whether the names of the columns are printed.
    """

    columns: str
    rows: Sequence[Sequence[Cell]]
    folded: str = ""
    extra: str = ""
    has_headings: bool = True

    @classmethod
    def of(
        cls, columns: str, found: Iterable[Any], made: Made | None = None, **looks: Any
    ) -> Table:
        """Return a table of objects or of JSON documents.

        Parameters
        ----------
        columns
            The fields, separated by commas. A field may have another heading, as in `by=late_s`.
            Numbers in fields whose names end in `_s` are seconds.
        made
            Makes the cells of columns that are no fields from an object.
        """
        made, pairs = made or {}, [each.partition("=")[::2] for each in columns.split(",")]
        cells = [made.get(name) or partial(_field, field or name) for name, field in pairs]
        rows = [[cell_of(each) for cell_of in cells] for each in found]
        return cls(",".join(name for name, _ in pairs), rows, **looks)


#: A line, (a line, its colour), or a table.
Part = str | tuple[str, str] | Table


def _field(name: str, found: Any) -> Cell:
    value = found[name] if isinstance(found, Mapping) else getattr(found, name)
    if isinstance(value, bool):
        return "yes" if value else None
    if name.endswith("_s") and value is not None:
        return show_measured(value)
    return list(value) if isinstance(value, tuple) else value


def fields(pairs: Sequence[tuple[str, Cell]]) -> Table:
    """Return a table with one line for each name and value."""
    return Table("name,value", pairs, folded="value", has_headings=False)


def text_of(parts: Sequence[Part]) -> str:
    """Return the text of the parts, for stdout."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += _lines(part, sys.stdout.isatty()) if part.rows else []
        else:
            # click.style would end even a plain line with a reset.
            lines.append(
                click.style(part[0], fg=part[1] or None) if isinstance(part, tuple) else part
            )
    return "\n".join(lines)


def _lines(table: Table, is_terminal: bool) -> list[str]:
    """Return the lines of a table."""
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    width = Console().width if is_terminal else _PIPE_WIDTH
    names, folded = table.columns.split(","), table.folded.split(",")
    columns = dict(zip(names, zip(*table.rows, strict=True), strict=True))
    texts, widths = dict[str, list[Text]](), dict[str, int]()
    for name, values in columns.items():
        longest = LONGEST_FOLDED if name in folded else LONGEST_CELL
        coloured = (value if isinstance(value, tuple) else (value, "") for value in values)
        texts[name] = [Text(cell(value, longest), colour) for value, colour in coloured]
        if not (is_terminal and all(each.plain == NOTHING for each in texts[name])):
            heading = len(name) * table.has_headings
            most = FOLDED_WIDTH if name in folded else LONGEST_CELL
            widths[name] = max(heading, *(min(each.cell_len, most) for each in texts[name]))
    for name in table.extra.split(","):
        if sum(widths.values()) + GAP * (len(widths) - 1) > width:
            widths.pop(name, None)
    looks: Any = {"box": None, "padding": (0, GAP, 0, 0), "pad_edge": False}
    grid = Grid(show_header=table.has_headings, **looks)
    for name, column_width in widths.items():
        is_number = all(isinstance(value, int | None) for value in columns[name])
        grid.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            width=None if name in folded else column_width,
        )
    for row in zip(*(texts[name] for name in widths), strict=True):
        grid.add_row(*row)
    console = Console(
        force_terminal=is_terminal, width=width, highlight=False, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(grid)
    return re.sub(r" +$", "", captured.get(), flags=re.MULTILINE).splitlines()


def cell(value: object, longest: int = LONGEST_CELL) -> str:
    """Return any value as one line without control characters."""
    match value:
        case None | "":
            return NOTHING
        case datetime():
            return show_instant(value)
        case int():
            return f"{value:,}"
        case list():
            value = ", ".join(map(str, value))
        case dict():
            value = json.dumps(value, ensure_ascii=False)
    return one_line(str(value), longest)


def plain(value: Any) -> Any:
    """Return a value as JSON has it. Named tuples become objects."""
    if isinstance(value, datetime):
        return show_instant(value)
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, frozenset):  # the tags of a worker
        return sorted(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


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


def coloured(status: str) -> tuple[str, str]:
    return status, _COLOURS.get(status.upper(), "")


# -- Errors ---------------------------------------------------------------------------------------


#: The key of click's `Context.meta` under which the root group notes whether --json is given.
WANTS_JSON = "delaytasks.json"


def is_json(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(WANTS_JSON))


def kind_of(error: Exception) -> dict[str, str]:
    """Return the fields of an error in JSON without its message."""
    kind = {"type": type(error).__name__}
    return kind | {"argument": error.argument} if isinstance(error, InvalidInputError) else kind


class Failure(click.ClickException):
    """An error of a command: one red line, or {"error": …, "type": …} if JSON is asked for."""

    exit_code: int  # type: ignore[misc]

    def __init__(
        self, error: Exception, is_json: bool, rewrite: Callable[[str], str] = str
    ) -> None:
        text = error.format_message() if isinstance(error, click.UsageError) else str(error)
        super().__init__(rewrite(text))
        is_callers = isinstance(error, (click.UsageError, InvalidInputError, ConfigError))
        self.exit_code = 2 if is_callers else 1
        self._kind = kind_of(error)
        self._is_json = is_json

    def show(self, file: Any = None) -> None:
        if self._is_json:
            click.echo(json.dumps({"error": self.message, **self._kind}), err=True)
        else:
            click.secho(f"Error: {one_line(self.message, LONGEST)}", fg=BAD, err=True)
