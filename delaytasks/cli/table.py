"""Tables on a terminal and in a pipe."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

#: Printed in a cell without a value, so that the columns of a piped table can be counted.
NOTHING = "-"
#: Text, or (text, colour).
Cell = str | tuple[str, str]
#: Spaces between two columns.
GAP = 2
#: A column of long texts has a place in its row if it gets this many characters.
LEAST_TEXT = 30
#: A column whose cells may take several lines is not made narrower than this.
LEAST_FOLDED = 12
#: Before a text that has a line of its own below its row.
INDENT = "    "


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    right: str = "",
    folded: str = "",
    extra: str = "",
    below: str = "",
) -> None:
    """Print a table: in a pipe without colour, frame or wrapping, one line for each row, two spaces or more between
    columns.

    On a terminal, columns without any value are left out. Where the rest is too wide, the `extra` columns are left out,
    in the order in which they are named; then the column `below` gets a line of its own below each row; then the cells
    of the `folded` columns take several lines.
    """
    cells = [[(each, "") if isinstance(each, str) else each for each in row] for row in rows]
    numbers = range(len(headings))
    if not sys.stdout.isatty():
        click.echo(_rendered(headings, cells, list(numbers), right, None), nl=False)
        return
    from rich.cells import cell_len
    from rich.console import Console

    total = Console(width=None).width
    widths = {
        n: max([cell_len(headings[n]), *(cell_len(row[n][0]) for row in cells)]) for n in numbers
    }
    shown = [n for n in numbers if not (cells and all(row[n][0] == NOTHING for row in cells))]
    last = headings.index(below) if below else None
    shown, is_below = _chosen(headings, widths, shown, extra.split(), last, total)
    if last is not None and last in shown:
        room = total - _needed(widths, [n for n in shown if n != last]) - GAP
        widths[last] = min(widths[last], max(room, LEAST_TEXT))
    else:
        _fold([n for n in shown if headings[n] in folded.split()], widths, shown, total)
    if not is_below or last is None:
        click.echo(_rendered(headings, cells, shown, right, widths), nl=False)
        return
    head = _rendered(headings, [], shown, right, widths)
    click.echo(head, nl=False)
    for row in cells:
        click.echo(_rendered((), [row], shown, right, widths, headings), nl=False)
        text, colour = row[last]
        if text != NOTHING:
            click.echo(_below(text, colour, total), nl=False)


def _chosen(
    headings: Sequence[str],
    widths: Mapping[int, int],
    shown: list[int],
    extra: list[str],
    last: int | None,
    total: int,
) -> tuple[list[int], bool]:
    """Return the columns to print, and whether the long texts are printed below their rows."""

    def is_too_wide(numbers: list[int]) -> bool:
        return (
            _needed(
                {n: min(widths[n], LEAST_TEXT) if n == last else widths[n] for n in numbers},
                numbers,
            )
            > total
        )

    for name in extra:
        if not is_too_wide(shown):
            break
        shown = [n for n in shown if headings[n] != name]
    if last in shown and is_too_wide(shown):
        return [n for n in shown if n != last], True
    return shown, False


def _needed(widths: Mapping[int, int], shown: Sequence[int]) -> int:
    return sum(widths[n] for n in shown) + GAP * max(len(shown) - 1, 0)


def _fold(folded: Sequence[int], widths: dict[int, int], shown: Sequence[int], total: int) -> None:
    """Make the widest of the folded columns narrower until the table fits."""
    while folded and _needed(widths, shown) > total:
        widest = max(folded, key=lambda n: widths[n])
        if widths[widest] <= LEAST_FOLDED:
            return
        widths[widest] -= 1


def _rendered(
    headings: Sequence[str],
    cells: Sequence[Sequence[tuple[str, str]]],
    shown: Sequence[int],
    right: str,
    widths: Mapping[int, int] | None,
    names: Sequence[str] = (),
) -> str:
    """Return the lines of a table; without `headings` those of its rows alone, whose columns are called `names`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    page, is_terminal = io.StringIO(), widths is not None
    console = Console(
        file=page, force_terminal=is_terminal, width=100_000, highlight=False, legacy_windows=False
    )
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=bool(headings))
    for number in shown:
        name = (headings or names)[number]
        justify: Any = "right" if name in right.split() else "left"
        width = None if widths is None else widths[number]
        table.add_column(
            name, justify=justify, overflow="fold", no_wrap=not is_terminal, width=width
        )
    for row in cells:
        # Text is taken as it is: no markup, no emoji codes.
        table.add_row(*(Text(row[number][0], style=row[number][1]) for number in shown))
    console.print(table)
    text = re.sub(r"[ ]+$", "", page.getvalue(), flags=re.MULTILINE)
    if widths is None or not headings:
        return text
    head, _, body = text.partition("\n")
    return f"{head}\n{'─' * _needed(widths, shown)}\n{body}"


def _below(text: str, colour: str, total: int) -> str:
    from rich.console import Console
    from rich.text import Text

    lines = Text(text).wrap(Console(width=total), max(total - len(INDENT), LEAST_FOLDED))
    return "".join(
        f"{INDENT}{click.style(line.plain.rstrip(), fg=colour or None)}\n" for line in lines
    )
