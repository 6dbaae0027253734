"""The part of `stats` about tasks on time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delaytasks.cli.output import BAD, Cell, print_table
from delaytasks.client import DelayTasks
from delaytasks.core.durations import show_duration
from delaytasks.core.errors import StoreError
from delaytasks.wiring import wiring_of

#: The ranges that are shown.
WINDOWS = {"hour": "1h", "day": "1d", "week": "7d"}


def gather_on_time(delays: DelayTasks) -> list[dict[str, Any]]:
    """Return the on-time shares of the last hour, day and week by tag.

    The tags are those with `on_time` in this process, and those with counts in the last hour: most
    processes of an operator have no processors.
    """
    try:
        tags = {one.tag for one in delays.statistics.on_time(since=WINDOWS["hour"])}
        tags |= {each.tag for each in wiring_of(delays).registry if each.on_time_s is not None}
        return _of_tags(delays, sorted(tags)) if tags else []
    except StoreError:
        return []  # the document has the error of the database


def _of_tags(delays: DelayTasks, tags: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for window, since in WINDOWS.items():
        for one in delays.statistics.on_time(since=since, tags=tags):
            about = {"tag": one.tag, "promised_s": one.promised_s, "target": one.target}
            empty = dict.fromkeys(WINDOWS)
            of_tag = found.setdefault(one.tag, {**about, **empty})
            numbers = one.as_json()
            of_tag[window] = {
                name: numbers[name] for name in ("on_time", "late", "share", "budget_left")
            }
    return [found[tag] for tag in sorted(found)]


def print_on_time(shares: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each tag."""
    rows: list[list[Cell]] = []
    for one in shares:
        promised = "" if one["promised_s"] is None else show_duration(one["promised_s"])
        rows.append([one["tag"], promised, *(_share(one[name], one["target"]) for name in WINDOWS)])
    print_table(
        ("on time", "within", *(f"last {name}" for name in WINDOWS)), rows, folded="on time"
    )


def _share(numbers: dict[str, Any] | None, target: float) -> Cell:
    if numbers is None:
        return "–"
    text = f"{numbers['share']:.2%} ({numbers['late']:,} late)"
    return (text, BAD if numbers["share"] < target else "")
