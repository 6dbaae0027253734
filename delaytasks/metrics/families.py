"""The values of one metric, as Prometheus and OpenTelemetry name them."""

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
