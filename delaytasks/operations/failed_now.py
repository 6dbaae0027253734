"""Groups of failed tasks that have the same tag and the same kind of error."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from delaytasks.core.error_patterns import error_pattern
from delaytasks.storage.failed_rows import FailedRow

#: Bars of a sparkline, one for each hour.
SPARK_HOURS = 24


@dataclass(frozen=True)
class FailedNow:
    """Failed tasks of one tag whose errors differ in numbers and quoted texts only."""

    name: str
    tag: str
    pattern: str
    sample: FailedRow
    tasks: int
    first_at: datetime | None
    last_at: datetime | None
    #: Failures in each of the last hours, the oldest first.
    hours: Sequence[int]

    @property
    def summary(self) -> str:
        """The type and the message of the exception, with `…` for what differs."""
        text = self.pattern.rpartition("\n")[2].strip("*").strip()
        return text.replace("*", "…") or "(no error text)"

    @property
    def filters(self) -> dict[str, Any]:
        """The filters of `find` for the tasks of the group."""
        error = {"error": self.pattern} if self.pattern.strip("*") else {}
        return {"tag": self.tag, "status": ["FAILED"], **error}

    @property
    def where(self) -> str:
        """The function that raised the exception; empty if the error is no traceback."""
        return self.pattern.partition("\n")[0].removeprefix("* in ") if "\n" in self.pattern else ""


def group_name(tag: str, pattern: str) -> str:
    """Return a short name of a group for addresses."""
    return hashlib.sha256(f"{tag}\n{pattern}".encode()).hexdigest()[:12]


def groups_of(rows: Iterable[FailedRow], now: datetime) -> list[FailedNow]:
    """Return the groups of the rows, those that failed last first."""
    found: dict[tuple[str, str], list[FailedRow]] = {}
    for row in rows:
        found.setdefault((row.tag, error_pattern(row.error or "")), []).append(row)
    groups = []
    for (tag, pattern), members in found.items():
        times = sorted(row.failed_at for row in members if row.failed_at is not None)
        newest = max(members, key=lambda row: (row.failed_at or row.due, row.id))
        groups.append(
            FailedNow(
                group_name(tag, pattern),
                tag,
                pattern,
                newest,
                len(members),
                times[0] if times else None,
                times[-1] if times else None,
                _hours(times, now),
            )
        )
    return sorted(groups, key=lambda group: group.sample.failed_at or group.sample.due)[::-1]


def _hours(times: Iterable[datetime], now: datetime) -> list[int]:
    counts = [0] * SPARK_HOURS
    for at in times:
        ago = (now - at) // timedelta(hours=1)
        if 0 <= ago < SPARK_HOURS:
            counts[SPARK_HOURS - 1 - ago] += 1
    return counts
