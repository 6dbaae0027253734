"""The values that `delays.statistics` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from delaytasks.core.run_counts import DURATION_BOUNDS_S, LATENESS_BOUNDS_S, RunCounts, quantile


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Counts of the runs of a tag, or of several tags together.

    Attributes
    ----------
    started
        The runs that began. A run is counted when it has ended.
    done, failed, retried, snoozed, cancelled
        How they ended. A retried run has failed and is repeated.
    expired
        Tasks that were too late to run.
    given_back
        Rows that a worker claimed and did not run: their time was over, or it could not run them.
    lease_lost
        Runs whose result was refused, since another worker had taken over the task.
    worker_lost
        Tasks that failed because their workers died too often.
    on_time, late
        For tags with `on_time`: the runs that began in time, and those that did not, together with
        the expired tasks.
    lateness_s, duration_s
        The sums of all latenesses and durations.
    lateness_max_s, duration_max_s
        The largest lateness and duration. If they are not known, upper bounds from the histograms.
    lateness, duration
        The number of runs in each bucket, whose upper bounds are `LATENESS_BOUNDS_S` and
        `DURATION_BOUNDS_S` of this module.
    """

    started: int
    done: int
    failed: int
    retried: int
    snoozed: int
    cancelled: int
    expired: int
    given_back: int
    lease_lost: int
    worker_lost: int
    on_time: int
    late: int
    lateness_s: float
    duration_s: float
    lateness_max_s: float
    duration_max_s: float
    lateness: tuple[int, ...]
    duration: tuple[int, ...]

    @classmethod
    def of(cls, counts: RunCounts) -> RunTotals:
        return cls(
            started=counts.started,
            **counts.by_outcome(),
            on_time=counts.on_time,
            late=counts.late,
            lateness_s=round(counts.lateness_s, 3),
            duration_s=round(counts.duration_s, 3),
            lateness_max_s=round(counts.lateness_max_s, 6),
            duration_max_s=round(counts.duration_max_s, 6),
            lateness=tuple(counts.lateness),
            duration=tuple(counts.duration),
        )

    @classmethod
    def total(cls, many: Iterable[RunTotals]) -> RunTotals:
        """Return the totals of several tags or steps together."""
        totals = [cls.of(RunCounts()), *many]
        sums: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(one, field.name) for one in totals]
            if field.name in ("lateness", "duration"):
                sums[field.name] = tuple(map(sum, zip(*values, strict=True)))
            else:
                is_highest = field.name in ("lateness_max_s", "duration_max_s")
                sums[field.name] = max(values) if is_highest else sum(values)
        return cls(**sums)

    def lateness_quantile(self, share: float) -> float | None:
        """Estimate the lateness that `share` of the runs do not exceed; None without runs."""
        return quantile(self.lateness, LATENESS_BOUNDS_S, share, self.lateness_max_s)

    def duration_quantile(self, share: float) -> float | None:
        """Estimate the duration that `share` of the runs do not exceed; None without runs."""
        return quantile(self.duration, DURATION_BOUNDS_S, share, self.duration_max_s)

    @property
    def on_time_share(self) -> float | None:
        """The share of tasks on time, from exact counts; None if none of them has `on_time`."""
        total = self.on_time + self.late
        return self.on_time / total if total else None

    def as_json(self) -> dict[str, Any]:
        """Return the counts and the usual quantiles as JSON values."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("lateness", "duration")
        }
        for share in (50, 99):
            values[f"lateness_p{share}_s"] = _rounded(self.lateness_quantile(share / 100))
            values[f"duration_p{share}_s"] = _rounded(self.duration_quantile(share / 100))
        values["on_time_share"] = self.on_time_share
        return values


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One step of a series: what ended in it."""

    start: datetime
    #: All tags together.
    total: RunTotals
    #: The tags that have runs.
    tags: Mapping[str, RunTotals]


@dataclass(frozen=True, slots=True)
class OnTime:
    """How many tasks of a tag began in the time that `@processor(tag, on_time=…)` promises.

    Attributes
    ----------
    tag
        The tag.
    promised_s
        The promise of the processor in this process; None if this process has no such processor.
    on_time, late
        Exact counts.
    target
        The share of tasks that should be on time.
    """

    tag: str
    promised_s: float | None
    on_time: int
    late: int
    target: float

    @property
    def share(self) -> float:
        """The share of tasks on time."""
        return self.on_time / (self.on_time + self.late)

    @property
    def budget(self) -> float:
        """The error budget: the number of tasks that may be late without missing the target."""
        return (self.on_time + self.late) * (1 - self.target)

    @property
    def budget_left(self) -> float:
        """The share of the error budget that is left. It is negative if the target is missed."""
        return 1 - self.late / self.budget if self.budget else float(not self.late)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "share": round(self.share, 6),
            "budget_left": round(self.budget_left, 4),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
