"""The part of `stats` about tasks on time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delaytasks.cli.output import BAD, Cell, print_table
from delaytasks.core.inputs import show_duration
from delaytasks.statistics.reading import WINDOWS

#: The range whose error budget is shown.
BUDGET_OF = "day"


def print_on_time(shares: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each tag."""
    rows: list[list[Cell]] = []
    for one in shares:
        promised = "" if one["promised_s"] is None else show_duration(one["promised_s"])
        windows = [_share(one[name], one["target"]) for name in WINDOWS]
        rows.append([one["tag"], promised, *windows, _budget(one[BUDGET_OF])])
    ranges = [f"last {name}" for name in WINDOWS]
    heads = ["on time", "within", *ranges, f"error budget left, {BUDGET_OF}"]
    print_table(heads, rows, folded="on time")


def _share(numbers: dict[str, Any] | None, target: float) -> Cell:
    if numbers is None:
        return "–"
    text = f"{numbers['share']:.2%} ({numbers['late']:,} late)"
    return (text, BAD if numbers["share"] < target else "")


def _budget(numbers: dict[str, Any] | None) -> Cell:
    if numbers is None:
        return "–"
    left = numbers["budget_left"]
    return (f"{left:.0%}", BAD if left < 0 else "")
