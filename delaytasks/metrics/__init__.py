"""Metrics of a deployment: what its tables contain, and what a process has run.

    snapshot     the metrics of the database, the broker, the timer and the forecast
    process      the metrics of a worker's main process, and of a process that schedules tasks
    prometheus   serves them to Prometheus, over HTTP or in a file
    files        the Grafana dashboard and the alert rules

This module has the values of one metric, as Prometheus names them. `delaytasks serve --metrics`
serves the snapshot. See docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

FamilyKind = Literal["gauge", "counter", "histogram"]


class HistogramValue(NamedTuple):
    """Counted times. `counts` has one bucket more than `bounds`, for all longer times."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


class Sample(NamedTuple):
    """One value, and the values of the family's labels in their order."""

    labels: tuple[str, ...]
    value: float | HistogramValue


class Family(NamedTuple):
    """One metric.

    The name is that of Prometheus, without the suffix `_total` of a counter. Durations are in
    seconds.
    """

    name: str
    about: str
    kind: FamilyKind
    labels: tuple[str, ...]
    samples: Sequence[Sample]


class Source(Protocol):
    """Returns the present values of some metrics."""

    def families(self) -> Iterable[Family]: ...


def gauge(name: str, about: str, value: float | bool | None) -> Family:
    """Return a metric without labels, and without a value if that is None."""
    samples = [] if value is None else [Sample((), float(value))]
    return Family(name, about, "gauge", (), samples)
