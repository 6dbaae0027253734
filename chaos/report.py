"""What a run prints at its end."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from chaos.checker import Verdict
from chaos.history import Fault, History
from delaytasks.core.states import Status

#: Later than this is somebody's fault.
LATE_US = 1_000_000


def show(verdict: Verdict, history: History, console: Console) -> None:
    late = lateness(history)
    console.width = max(console.width, 110)  # also into a file
    table = Table("fault", "times", "tasks late by it", "late by: p50 s", "p99 s", "max s")
    for kind, times in sorted(Counter(fault.kind for fault in history.faults).items()):
        table.add_row(kind, str(times), *_spread(late.pop(kind, [])))
    for kind, some in late.items():
        table.add_row(kind, "", *_spread(some))
    console.print(table)
    asked = Counter(f"{told.call} {told.answer}" for told in history.told)
    console.print(", ".join(f"{count:,} {what}" for what, count in sorted(asked.items())))
    counts = verdict.counts()
    bar = Table("tasks", "faults", "lost", "early", "duplicates explained", "other findings")
    other = sum(counts.values()) - counts["lost"] - counts["early"]
    cells = (verdict.tasks, len(history.faults), counts["lost"], counts["early"], verdict.explained, other)
    bar.add_row(*(f"{cell:,}" for cell in cells))
    console.print(bar)
    console.print(str(verdict))


def _spread(seconds: list[float]) -> list[str]:
    some = sorted(seconds)
    cells = [f"{some[min(int(len(some) * part), len(some) - 1)]:.1f}" if some else "" for part in (0.5, 0.99, 1)]
    return [f"{len(some):,}", *cells]


def lateness(history: History) -> dict[str, list[float]]:
    """Seconds from the time when a task could have run to its end, by the fault that had most to do with it."""
    found: dict[str, list[float]] = {}
    since: dict[int, int] = {}
    due: dict[int, int] = {}
    for change in history.changes:
        if change.was is None or change.due_us != due[change.id]:
            due[change.id], since[change.id] = change.due_us, max(change.due_us, change.at_us)
        elif change.status in (Status.DONE, Status.FAILED) and change.at_us - since[change.id] > LATE_US:
            kind = _to_blame(history.faults, since[change.id], change.at_us)
            found.setdefault(kind, []).append((change.at_us - since[change.id]) / 1e6)
    return found


def _to_blame(faults: list[Fault], from_us: int, until_us: int) -> str:
    """The one that overlaps the time most; else the last one before it."""
    before = [fault for fault in faults if fault.from_us <= until_us]
    if not before:
        return "none"
    return max(before, key=lambda f: (min(f.until_us, until_us) - max(f.from_us, from_us), f.from_us)).kind
