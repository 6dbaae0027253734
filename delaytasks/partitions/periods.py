"""The periods of partitions."""

from __future__ import annotations

from datetime import datetime, timedelta

from delaytasks.core.ids import made_at

Period = tuple[datetime, datetime]


def edge_after(instant: datetime, every: timedelta) -> datetime:
    """Return the next edge between partitions: a multiple of `every` since the first id."""
    return made_at(0) + ((instant - made_at(0)) // every + 1) * every


def periods(start: datetime, end: datetime, every: timedelta) -> list[Period]:
    """Return the periods from `start` to `end`. Only `start` may lie between two edges."""
    found = []
    while start < end:
        found.append((start, edge_after(start, every)))
        start = found[-1][1]
    return found
