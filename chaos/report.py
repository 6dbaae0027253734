"""Print the results of a run."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from chaos.checker import Verdict
from chaos.history import Fault, History
from chaos.nemeses import KILL
from chaos.run import STALL
from delaytasks.model.moves import Status

#: A task that is later than this is attributed to a fault.
LATE_US = 1_000_000
PARTS = (0.5, 0.99, 1)


class Late(NamedTuple):
    """A late task, and the fault that most likely caused it."""

    fault: Fault | None
    #: When it could have run.
    from_us: int
    ended_us: int


def show(verdict: Verdict, history: History, over_us: int, console: Console) -> None:
    """Print the results. Late tasks count until `over_us`."""
    console.width = max(console.width, 130)  # also if the output is a file
    console.print(_by_fault(history.faults, late_tasks(history, over_us)))
    asked = Counter(f"{record.call} {record.answer}" for record in history.call_records)
    console.print(", ".join(f"{count:,} {what}" for what, count in sorted(asked.items())))
    console.print(_bar(verdict, history))
    console.print(str(verdict))


def _by_fault(faults: list[Fault], late: list[Late]) -> Table:
    recovered = recoveries(faults, late)
    table = Table(
        "fault",
        "times",
        "recovered in: p50 s",
        "p99 s",
        "max s",
        "late tasks",
        "by: p50 s",
        "p99 s",
        "max s",
    )
    times = Counter(fault.kind for fault in faults)
    for kind in [*sorted(times), *({"none"} if any(one.fault is None for one in late) else ())]:
        seconds = [
            (o.ended_us - o.from_us) / 1e6
            for o in late
            if (o.fault.kind if o.fault else "none") == kind
        ]
        table.add_row(
            kind,
            str(times[kind]),
            *_spread(recovered.get(kind, [])),
            f"{len(seconds):,}",
            *_spread(seconds),
        )
    return table


def _bar(verdict: Verdict, history: History) -> Table:
    faults = [fault for fault in history.faults if fault.kind != STALL]
    counts = verdict.counts()
    cells = {
        "tasks": verdict.tasks,
        "faults": len(faults),
        "kills": sum(KILL in fault.kind for fault in faults),
        "lost": counts["lost"],
        "early": counts["early"],
        "duplicates explained": verdict.explained,
        "not explained": counts["duplicated"],
        "stuck": counts["stuck"] + counts["late"],
        "of these, finished later": counts["late"],
    }
    named = sum(counts[kind] for kind in ("lost", "early", "duplicated", "stuck", "late"))
    table = Table(*cells, "other findings")
    table.add_row(*(f"{cell:,}" for cell in cells.values()), f"{sum(counts.values()) - named:,}")
    return table


def _spread(seconds: list[float]) -> list[str]:
    some = sorted(seconds)
    return [
        f"{some[min(int(len(some) * part), len(some) - 1)]:.1f}" if some else "" for part in PARTS
    ]


def late_tasks(history: History, over_us: int) -> list[Late]:
    found: list[Late] = []
    since: dict[int, int] = {}
    due: dict[int, int] = {}
    for change in history.changes:
        if change.was is None and change.at_us > over_us:
            break
        if change.was is None or change.due_us != due[change.id]:
            due[change.id], since[change.id] = change.due_us, max(change.due_us, change.at_us)
        elif (
            change.status in (Status.DONE, Status.FAILED)
            and change.at_us - since[change.id] > LATE_US
        ):
            fault = _to_blame(history.faults, since[change.id], change.at_us)
            found.append(Late(fault, since[change.id], change.at_us))
    return found


def recoveries(faults: list[Fault], late: list[Late]) -> dict[str, list[float]]:
    """Return the recovery times of each kind of fault in seconds.

    A recovery lasts from the end of a fault (of a kill: its begin) until all tasks that it delayed
    are finished.
    """
    ended: dict[Fault, int] = {}
    for one in late:
        if one.fault is not None:
            ended[one.fault] = max(ended.get(one.fault, 0), one.ended_us)
    found: dict[str, list[float]] = {}
    for fault in faults:
        since_us = fault.from_us if fault.effect == "dead" else fault.until_us
        found.setdefault(fault.kind, []).append(max(ended.get(fault, 0) - since_us, 0) / 1e6)
    return found


def _to_blame(faults: list[Fault], from_us: int, until_us: int) -> Fault | None:
    """Return the fault that overlaps the period most, else the last fault before it."""
    before = [fault for fault in faults if fault.from_us <= until_us]
    if not before:
        return None
    return max(
        before, key=lambda f: (min(f.until_us, until_us) - max(f.from_us, from_us), f.from_us)
    )
