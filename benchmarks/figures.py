"""The figures of a run: values of several rounds for each side, and their targets."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OURS, BARE = "delaytasks", "celery"


@dataclass
class Figure:
    """One line of a table: the values of each side by the number of the round."""

    case: str
    #: What was measured, a comma and the unit.
    name: str
    #: A bound of our value, `<= 5`, or of its ratio to bare Celery's, `>= 10 x`; or nothing.
    target: str = ""
    values: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The side whose values have the target and the ratios."""
        names = [name for name in self.values if name != BARE] or [BARE]
        return OURS if OURS in names else names[0]

    @property
    def ratios(self) -> list[float]:
        """The ratios of the first side to bare Celery. What slows the machine slows both."""
        if self.first == BARE:
            return []
        ours, bare = self.values[self.first], self.values.get(BARE, {})
        return [value / bare[number] for number, value in ours.items() if bare.get(number)]

    @property
    def is_reached(self) -> bool | None:
        sign, bound, *of_ratio = self.target.split() or ["", ""]
        values = self.ratios if of_ratio else [*self.values[self.first].values()]
        if not sign or not values:
            return None
        value = statistics.median(values)
        return value <= float(bound) if sign == "<=" else value >= float(bound)

    def as_json(self) -> dict[str, Any]:
        what, _, unit = self.name.rpartition(", ")
        return {
            "case": self.case,
            "what": what,
            "unit": unit,
            **{side: [*rounds.values()] for side, rounds in self.values.items()},
            "ratios": self.ratios,
            "target": self.target,
            "reached": self.is_reached,
        }


@dataclass
class Results:
    """Everything that a run found."""

    console: Console
    machine: Mapping[str, str] = field(default_factory=dict)
    figures: dict[tuple[str, str], Figure] = field(default_factory=dict)
    #: What a reader of a value has to know, by case and side.
    remarks: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(
        self,
        case: str,
        side: str,
        number: int,
        found: Mapping[str, float],
        targets: Mapping[str, str],
    ) -> None:
        """Add the values of a round. The keys of `targets` are ends of the names of figures."""
        for name, value in found.items():
            target = next((one for end, one in targets.items() if name.endswith(end)), "")
            figure = self.figures.setdefault((case, name), Figure(case, name, target))
            figure.values.setdefault(side, {})[number] = value

    def remark(self, case: str, side: str, text: str) -> None:
        known = self.remarks.setdefault(case, {}).setdefault(side, [])
        if text not in known:
            known.append(text)

    def print_case(self, case: str) -> None:
        figures = [figure for figure in self.figures.values() if figure.case == case]
        sides = list(dict.fromkeys(side for figure in figures for side in figure.values))
        made = Table(
            title=f"{case}: median (min to max of the rounds)",
            title_justify="left",
            header_style="bold",
        )
        if len(sides) > 4:
            self._fill_by_side(made, figures, sides)
        else:
            self._fill_by_figure(made, figures, sides)
        self.console.print(made)
        for side, texts in self.remarks.get(case, {}).items():
            self.console.print(f"{side}: {'; '.join(texts)}", highlight=False, markup=False)

    @staticmethod
    def _fill_by_side(made: Table, figures: Sequence[Figure], sides: Sequence[str]) -> None:
        made.add_column("system")
        for figure in figures:
            made.add_column(figure.name, justify="right")
        for side in sides:
            made.add_row(side, *[spread([*each.values.get(side, {}).values()]) for each in figures])

    @staticmethod
    def _fill_by_figure(made: Table, figures: Sequence[Figure], sides: Sequence[str]) -> None:
        ratio = [f"{figures[0].first} / {BARE}"] if any(each.ratios for each in figures) else []
        made.add_column("figure")
        for name in [*sides, *ratio, "target", "reached"]:
            made.add_column(name, justify="right")
        for figure in figures:
            cells = [spread([*figure.values.get(side, {}).values()]) for side in sides]
            if ratio:
                cells.append(f"{spread(figure.ratios)} ×" if figure.ratios else "–")
            reached = {True: "yes", False: "[red]no[/red]", None: ""}[figure.is_reached]
            made.add_row(figure.name, *cells, figure.target, reached)

    def write(self, file: Path | None, **more: object) -> None:
        """Write the results so far. A run may take hours, and an abort must not lose them."""
        if file is None:
            return
        document = {
            "machine": self.machine,
            **more,
            "figures": [figure.as_json() for figure in self.figures.values()],
            "remarks": self.remarks,
            "failures": self.failures,
        }
        file.write_text(json.dumps(document, indent=1) + os.linesep)


def console() -> Console:
    # In a log file, tables need longer lines than eighty characters.
    made = Console()
    return made if made.is_terminal else Console(width=200)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def late(ms: Sequence[float], what: str = "") -> dict[str, float]:
    """Return the figures of how late tasks began."""
    return {
        f"{what}lateness p50, ms": percentile(ms, 0.5),
        f"{what}lateness p99, ms": percentile(ms, 0.99),
    }


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    middle = short(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({short(min(values))} to {short(max(values))})"


def short(value: float) -> str:
    if value < 0:
        return f"-{short(-value)}"
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"
