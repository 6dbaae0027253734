"""`top`: a live view of queues, tags and workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import BAD, DURATION, GOOD, NOTHING, cell, print_json, show_instant
from delaytasks.cli.stats import read_deployment
from delaytasks.core.clock import monotonic
from delaytasks.core.inputs import show_duration, show_measured
from delaytasks.core.workers import LostWorker, RegisteredWorker
from delaytasks.operations.live import LiveGroup, LiveSnapshot, snapshot
from delaytasks.operations.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from delaytasks.client import DelayTasks

#: The columns of queues and tags: heading, and the least width of a terminal that shows it.
_GROUP_COLUMNS = {
    "running": 0,
    "overdue": 0,
    "by": 60,
    "due in 1m": 70,
    "held": 100,
    "done in 1m": 0,
    "failed": 80,
    "late p50": 110,
    "late p99": 60,
    "workers": 90,
}
#: The columns of workers.
_WORKER_COLUMNS = {"seen": 0, "runs": 0, "processes": 60, "pool": 80, "queues": 70}
WARNING = "yellow"
_LEVEL_COLOURS = {"good": GOOD, "note": GOOD, "warning": WARNING, "bad": BAD}
#: A lateness from which a number is marked.
MARKED_LATE_S = 1.0
#: The verdict is read again after this time, since it asks the broker, too.
VERDICT_S = 10.0


class LiveView(NamedTuple):
    found: LiveSnapshot
    verdict: Verdict


class RecentVerdict:
    """Reads the verdict every few seconds."""

    def __init__(self, delays: DelayTasks) -> None:
        self._delays = delays
        self._verdict: Verdict | None = None
        self._read_at = float("-inf")

    def get(self) -> Verdict:
        if self._verdict is None or monotonic() - self._read_at > VERDICT_S:
            self._verdict = verdict_of(read_deployment(self._delays))
            self._read_at = monotonic()
        return self._verdict


@click.command(cls=Command)
@click.option(
    "--every", type=DURATION, default="2s", show_default=True, help="The time between two reads."
)
@click.option("--once", is_flag=True, help="Print the view once, for scripts and pipes.")
@click.option("--for", "for_", type=DURATION, hidden=True, help="Stop after this time.")
@pass_cli
def top(cli: Cli, every: timedelta, once: bool, for_: timedelta | None) -> None:
    """Show queues, tags and workers, and renew the view every few seconds. Ctrl-C ends it.

    Each queue and each tag has the number of its tasks that run, that are overdue, that are due
    within a minute, and that were due within the last minute and have ended, with their lateness.
    A narrow terminal has fewer columns. --json prints the view once.

    \b
    delaytasks top
    delaytasks top --once
    """

    verdicts = RecentVerdict(cli.delays)

    def read() -> LiveView:
        found = snapshot(cli.store, cli.delays.settings)
        return LiveView(found, verdicts.get())

    if cli.is_json:
        found, verdict = read()
        print_json({"verdict": verdict.as_json(), **found.as_json()})
        return
    from rich.console import Console

    console = Console()
    if once or not console.is_terminal:
        console.print(view(*read(), console.width, None))
        return
    _renew(console, read, every.total_seconds(), for_)


def _renew(
    console: Console, read: Callable[[], LiveView], every_s: float, for_: timedelta | None
) -> None:
    from rich.live import Live

    rounds = None if for_ is None else int(for_.total_seconds() / every_s)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while rounds is None or rounds >= 0:
                found, verdict = read()
                live.update(view(found, verdict, console.width, console.height), refresh=True)
                rounds = None if rounds is None else rounds - 1
                time.sleep(every_s)
        except KeyboardInterrupt:
            pass  # the way to end this command


def view(found: LiveSnapshot, verdict: Verdict, width: int, height: int | None) -> RenderableType:
    """Return the view for a terminal of this size. Without a height, it has all rows."""
    from rich.console import Group as Lines
    from rich.text import Text

    # The header, the headings, and the empty lines between the parts.
    rows = max((height or 10_000) - 12, 6)
    workers = found.workers[: max(rows // 4, 2)]
    queues = found.queues[: max(rows // 3, 2)]
    tags = found.tags[: max(rows - len(workers) - len(queues), 2)]
    parts: list[RenderableType] = [*_header(found, verdict), Text()]
    for name, groups, all_groups in (("queue", queues, found.queues), ("tag", tags, found.tags)):
        parts += [_groups(name, groups, width), _more(len(all_groups) - len(groups))]
    if not found.workers:
        parts.append(Text("no workers", WARNING))
    if found.workers or found.lost:
        lost = found.lost[: max(rows // 8, 2)]
        parts += [
            _workers(workers, found.running_of, lost, found.now, width),
            _more(len(found.workers) - len(workers) + len(found.lost) - len(lost)),
        ]
    return Lines(*parts)


def _header(found: LiveSnapshot, verdict: Verdict) -> Sequence[Text]:
    from rich.text import Text

    total = found.total
    first = Text.assemble(
        ("delaytasks ", "bold"),
        f"{show_instant(found.now)}   ",
        _number("running", total.running, ""),
        _number("overdue", total.overdue, BAD if total.overdue else ""),
        _number("held", total.held, WARNING if total.held else ""),
        _number("due in 1m", total.soon, ""),
        _number("done in 1m", total.ended - total.failed, ""),
        _number("failed", total.failed, BAD if total.failed else ""),
        overflow="fold",
    )
    headline = Text(verdict.headline, _LEVEL_COLOURS[verdict.level], no_wrap=True)
    headline.overflow = "ellipsis"
    lines = [first, headline]
    swept = "never" if found.swept_s is None else f"{show_duration(found.swept_s)} ago"
    alive = sum(worker.is_alive for worker in found.workers)
    state = Text.assemble(
        "workers ",
        (f"{alive}", GOOD if alive else BAD),
        f" of {len(found.workers)}   last sweep ",
        (swept, BAD if found.is_sweep_late else GOOD),
    )
    if found.is_capped:
        state.append("   there are more tasks than these counts: they are minima", WARNING)
    lines.append(state)
    return lines


def _number(name: str, number: int, style: str) -> Text:
    from rich.text import Text

    return Text.assemble(f"{name} ", (f"{number:,}", style or "bold"), "   ")


def _more(number: int) -> Text:
    from rich.text import Text

    return Text(f"and {number} more" if number > 0 else "", "dim")


def _table(name: str, columns: dict[str, int], width: int) -> tuple[Table, list[str]]:
    """Return an empty table, and the headings of the columns for which there is space."""
    from rich.table import Table

    shown = [heading for heading, least in columns.items() if width >= least]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=12, ratio=None)
    for heading in shown:
        is_text = heading in ("pool", "queues")
        table.add_column(
            heading, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis"
        )
    return table, shown


def _groups(name: str, groups: Sequence[LiveGroup], width: int) -> Table:
    from rich.text import Text

    table, shown = _table(name, _GROUP_COLUMNS, width)
    for group in groups:
        values = _values(group)
        title = Text(cell(group.name), "bold")
        if group.is_paused:
            title.append(" paused", WARNING)
        table.add_row(title, *(values[heading] for heading in shown))
    return table


def _values(group: LiveGroup) -> dict[str, Text]:
    from rich.text import Text

    p50, p99 = group.lateness(0.5), group.lateness(0.99)
    late = show_duration(group.oldest_overdue_s) if group.overdue else NOTHING
    return {
        "running": _count(group.running),
        "overdue": _count(group.overdue, BAD),
        "by": Text(late, BAD if group.overdue else "dim"),
        "due in 1m": _count(group.soon),
        "held": _count(group.held, WARNING),
        "done in 1m": _count(group.ended - group.failed),
        "failed": _count(group.failed, BAD),
        "late p50": _lateness(p50),
        "late p99": _lateness(p99),
        "workers": _count(group.workers),
    }


def _count(number: int, style: str = "") -> Text:
    from rich.text import Text

    return Text(f"{number:,}", style) if number else Text(NOTHING, "dim")


def _lateness(late_s: float | None) -> Text:
    from rich.text import Text

    if late_s is None:
        return Text(NOTHING, "dim")
    return Text(show_measured(late_s), BAD if late_s >= MARKED_LATE_S else GOOD)


def _workers(
    workers: Sequence[RegisteredWorker],
    running_of: Mapping[str, int],
    lost: Sequence[LostWorker],
    now: datetime,
    width: int,
) -> Table:
    from rich.text import Text

    table, shown = _table("worker", _WORKER_COLUMNS, width)
    for worker in workers:
        age = Text(f"{show_duration(worker.age_s)} ago", GOOD if worker.is_alive else BAD)
        runs = _count(running_of.get(worker.name, 0))
        table.add_row(*_worker_row(worker, age, runs, shown))
    for gone in lost:
        ago = show_duration((now - gone.lost_at).total_seconds())
        table.add_row(*_worker_row(gone, Text(f"lost {ago} ago", BAD), Text(NOTHING, "dim"), shown))
    return table


def _worker_row(
    worker: RegisteredWorker | LostWorker, seen: Text, runs: Text, shown: Sequence[str]
) -> list[Text]:
    from rich.text import Text

    values = {
        "seen": seen,
        "runs": runs,
        "processes": Text(f"{worker.concurrency}"),
        "pool": Text(cell(worker.pool)),
        "queues": Text(cell(", ".join(worker.queues))),
    }
    return [Text(cell(worker.name), "bold"), *(values[heading] for heading in shown)]
