"""The report of every command: how long tasks waited after each kind of fault, and the findings."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.table import Table

from chaos.checker import Recovery, Verdict

COLUMNS = ("fault", "times", "waits", "longest wait: p50 s", "p99 s", "max s", "bound s")
PARTS = (0.5, 0.99, 1)
#: The exit status of a command that has findings.
HAS_FINDINGS = 1


def console() -> Console:
    made = Console(highlight=False, markup=False, soft_wrap=True)
    made.width = max(made.width, 130)  # also if the output is a file
    return made


def show(verdict: Verdict, output: Console, has_table: bool = True) -> int:
    """Print a verdict, and return the exit status."""
    if has_table:
        by_kind = defaultdict[str, list[Recovery]](list)
        for recovery in verdict.recoveries:
            by_kind[recovery.fault.kind].append(recovery)
        table = Table(*COLUMNS)
        for kind, some in sorted(by_kind.items()):
            seconds = sorted(recovery.seconds for recovery in some)
            spread = [seconds[min(int(len(some) * part), len(some) - 1)] for part in PARTS]
            bounds = some[0].fault.bounds_s
            table.add_row(
                kind,
                str(len(some)),
                f"{sum(recovery.tasks for recovery in some):,}",
                *(f"{each:.2f}" for each in spread),
                f"{bounds[0]:g}" if bounds else "",
            )
        output.print(table)
    output.print(str(verdict))
    return HAS_FINDINGS if verdict.findings else 0
