"""The periods of stored counts: minutes, hours with minutes as parts, and days with hours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

from delaytasks.core.run_counts import RunCounts
from delaytasks.statistics.gauges import Gauges, unpacked_gauges
from delaytasks.statistics.stored_counts import counts_of, unpacked_counts, unpacked_total

#: The values of the column `period`.
MINUTE, HOUR, DAY = "minute", "hour", "day"
#: The tag of the rows that contain gauges.
GAUGES = ""


class Longer(NamedTuple):
    """A period that has shorter ones as parts."""

    period: str
    length: timedelta
    #: How many parts it has, and the length of each.
    size: int
    part: timedelta
    start_of: Callable[[datetime], datetime]

    def part_of(self, instant: datetime) -> int:
        """Return the number of the part that contains an instant."""
        return (instant - self.start_of(instant)) // self.part


_MINUTE, _HOUR = timedelta(minutes=1), timedelta(hours=1)
HOUR_OF_MINUTES = Longer(
    HOUR, _HOUR, 60, _MINUTE, lambda at: at.replace(minute=0, second=0, microsecond=0)
)
DAY_OF_HOURS = Longer(
    DAY,
    timedelta(days=1),
    24,
    _HOUR,
    lambda at: at.replace(hour=0, minute=0, second=0, microsecond=0),
)
#: The next longer period of each one, which has one of its rows in each part.
LONGER = {MINUTE: HOUR_OF_MINUTES, HOUR: DAY_OF_HOURS}
#: The length of the parts of each period's rows.
PART_OF = {MINUTE: _MINUTE, HOUR: HOUR_OF_MINUTES.part, DAY: DAY_OF_HOURS.part}
#: The number of parts of each period's rows.
PARTS_OF_ROW = {MINUTE: 1, HOUR: HOUR_OF_MINUTES.size, DAY: DAY_OF_HOURS.size}


def counts_in(counts: str | None, parts: bytes | None) -> dict[int, RunCounts]:
    """Return the counts of a row by the number of the part; a minute has one."""
    return unpacked_counts(parts) if parts is not None else {0: counts_of(counts or "")}


def total_in(counts: str | None, parts: bytes | None) -> RunCounts | None:
    """Return the counts of all parts of a row together; None if it has none."""
    return unpacked_total(parts) if parts is not None else counts_of(counts or "")


def gauges_in(counts: str | None, parts: bytes | None) -> dict[int, Gauges]:
    """Return the gauges of a row by the number of the part; a minute has one."""
    return unpacked_gauges(parts) if parts is not None else {0: Gauges.of(counts or "")}
