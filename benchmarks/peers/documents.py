"""Measurements for docs/benchmarks.md: the rounds that fit into 20 minutes, as Markdown tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TypeVar

from benchmarks import report

T = TypeVar("T")
LIMIT_S = 20 * 60.0
#: This figure is the difference of two others.
_LEFT_OUT = frozenset({"CPU of the servers, ms per task"})
#: The values of each round, by system.
Values = Mapping[str, Mapping[int, float]]


def rounds_within(
    rows: Sequence[T], limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[T, int]]:
    """Yield each row with the number of its round, round after round.

    A round begins if it will probably end in time. The first round ends early if the limit is over,
    so the last rows may have no values.
    """
    began = clock()
    for number in count():
        round_began = clock()
        for row in rows:
            if clock() - began >= limit_s:
                return
            yield row, number
        now = clock()
        if now - began + (now - round_began) > limit_s:
            return


def markdown(
    command: str,
    facts: Mapping[str, str],
    loads: Mapping[str, Sequence[float]],
    values: Mapping[tuple[str, str], Values],
    ours: str,
    bare: str,
) -> str:
    """Return one table for each load. The names of rows are a load, a comma and a condition."""
    shown: dict[str, dict[str, dict[str, str]]] = {}
    for (row, figure), of_systems in values.items():
        if figure not in _LEFT_OUT:
            load, _, condition = row.partition(", ")
            cells = shown.setdefault(load, {}).setdefault(condition, {})
            cells[figure] = _cell(of_systems, ours, bare)
    before = [load for some in loads.values() for load in some]
    lines = [
        f"`./dev bench {command}`: {', '.join(f'{name} {fact}' for name, fact in facts.items())}; "
        f"load of the machine before a measurement {report.spread(before)}. Cells: {ours} / "
        f"{bare} (median of the ratios of the rounds)."
    ]
    for load, conditions in shown.items():
        figures = list(dict.fromkeys(name for cells in conditions.values() for name in cells))
        lines += ["", f"| {load} | {' | '.join(figures)} |", "|---" * (len(figures) + 1) + "|"]
        for condition, cells in conditions.items():
            row_cells = " | ".join(cells.get(figure, "–") for figure in figures)
            lines.append(f"| {condition} | {row_cells} |")
    return "\n".join(lines) + "\n"


def _cell(values: Values, ours: str, bare: str) -> str:
    medians = {
        name: report.short(statistics.median(rounds.values()))
        for name, rounds in values.items()
        if rounds
    }
    ratios = [
        value / values[bare][number]
        for number, value in values.get(ours, {}).items()
        if values.get(bare, {}).get(number)
    ]
    cell = " / ".join(medians.get(name, "–") for name in (ours, bare) if name in values)
    return f"{cell} ({report.short(statistics.median(ratios))})" if ratios else cell
