"""The periods of stored counts: minutes, hours with minutes as parts, and days with hours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

from delaytasks.core.clock import AN_HOUR, hour_of
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


_MINUTE = timedelta(minutes=1)
HOUR_OF_MINUTES = Longer(HOUR, AN_HOUR, 60, _MINUTE, hour_of)
DAY_OF_HOURS = Longer(
    DAY,
    timedelta(days=1),
    24,
    AN_HOUR,
    lambda at: hour_of(at).replace(hour=0),
)
#: The next longer period of each one, which has one of its rows in each part.
LONGER = {MINUTE: HOUR_OF_MINUTES, HOUR: DAY_OF_HOURS}
#: The length of the parts of each period's rows.
PART_OF = {MINUTE: _MINUTE, HOUR: HOUR_OF_MINUTES.part, DAY: DAY_OF_HOURS.part}
#: The number of parts of each period's rows.
PARTS_OF_ROW = {MINUTE: 1, HOUR: HOUR_OF_MINUTES.size, DAY: DAY_OF_HOURS.size}


class StoredRow(NamedTuple):
    """A row of statistics. A minute has `counts` and the largest times, and the others `parts`."""

    period: str
    start: datetime
    tag: str
    counts: str | None
    parts: bytes | None
    lateness_max_s: float | None
    duration_max_s: float | None

    def minute(self) -> RunCounts:
        return counts_of(self.counts or "", self.lateness_max_s, self.duration_max_s)


def counts_in(row: StoredRow) -> dict[int, RunCounts]:
    """Return the counts of a row by the number of the part; a minute has one."""
    return unpacked_counts(row.parts) if row.parts is not None else {0: row.minute()}


def total_in(row: StoredRow) -> RunCounts | None:
    """Return the counts of all parts of a row together; None if it has none."""
    return unpacked_total(row.parts) if row.parts is not None else row.minute()


def gauges_in(row: StoredRow) -> dict[int, Gauges]:
    """Return the gauges of a row by the number of the part; a minute has one."""
    if row.parts is not None:
        return unpacked_gauges(row.parts)
    return {0: Gauges.of(row.counts or "")}
