"""The metrics of the databases as observable gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

from delaytasks.metrics.families import Family, HistogramValue
from delaytasks.metrics.snapshot import DatabaseMetrics, known_families
from delaytasks.wiring import wiring_of

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks

ObserveValues = Callable[[CallbackOptions], Iterable[Observation]]


def observe(delays: DelayTasks, meter_provider: MeterProvider | None = None) -> None:
    """Make gauges of what the databases, the broker and the timer contain.

    Call it in one process of a deployment, since each process reads the same values.

    Parameters
    ----------
    delays
        The delayed tasks.
    meter_provider
        By default the global one.

    Examples
    --------
    >>> observe(delays)
    """
    source = DatabaseMetrics(wiring_of(delays))
    meter = get_meter("delaytasks", meter_provider=meter_provider)
    for family in known_families():
        is_duration = family.name.endswith("_seconds")
        name = family.name.removesuffix("_seconds").replace("delaytasks_", "delaytasks.", 1)
        meter.create_observable_gauge(
            name,
            [_callback(source, family)],
            unit="s" if is_duration else "1",
            description=family.about,
        )


def _callback(source: DatabaseMetrics, of: Family) -> ObserveValues:
    def values(_: CallbackOptions) -> Iterator[Observation]:
        for family in source.families():
            if family.name != of.name:
                continue
            for labels, value in family.samples:
                assert not isinstance(value, HistogramValue)
                attributes = dict(zip(family.labels, labels, strict=True))
                yield Observation(value, {f"delaytasks.{k}": v for k, v in attributes.items()})

    return values
