"""Print the figures as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure


def console() -> Console:
    # In a log file, tables need longer lines than eighty characters.
    made = Console()
    return made if made.is_terminal else Console(width=160)


def print_facts(target: Console, facts: Mapping[str, str]) -> None:
    target.print(" · ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    target.print(
        "2 prefork processes a worker; the server's synchronous_commit, except for our claims; no "
        "task events.",
        style="dim",
    )


def print_table(target: Console, figures: Sequence[Figure]) -> None:
    made = Table(
        title="median (min to max of the rounds)", title_justify="left", header_style="bold"
    )
    made.add_column("case")
    made.add_column("what")
    for name in ("delaytasks", "bare Celery eta", "ratio", "target"):
        made.add_column(name, justify="right")
    made.add_column("reached")
    for figure in figures:
        if not figure.ours:
            continue
        label = f"{figure.against} " if figure.against and figure.bare else ""
        made.add_row(
            figure.case,
            figure.what + (f" [dim]{figure.remark}[/dim]" if figure.remark else ""),
            f"{spread(figure.ours)} {figure.unit}",
            f"{label}{spread(figure.bare)} {figure.unit}" if figure.bare else "–",
            f"{spread(figure.ratios)} ×" if figure.ratios and all(figure.bare) else "–",
            "" if figure.target is None else str(figure.target),
            {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[figure.is_reached],
        )
    target.print(made)


def spread(values: Sequence[float]) -> str:
    middle = short(statistics.median(values))
    return (
        middle if len(values) == 1 else f"{middle} ({short(min(values))} to {short(max(values))})"
    )


def short(value: float) -> str:
    if value < 0:
        return f"-{short(-value)}"
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"
