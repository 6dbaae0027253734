"""The metrics of the databases and of a worker, as instruments that OpenTelemetry reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

from delaytasks.core.errors import ConfigError
from delaytasks.metrics.families import Family, HistogramValue, Sample, Source
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
    _make(DatabaseMetrics(wiring_of(delays)), known_families(), meter_provider)


def observe_worker(consumer: Any, meter_provider: MeterProvider | None = None) -> None:
    """Make instruments of what the main process of a worker knows.

    These are its pool, timer, loops and sweeps, and the runs of the whole pool, with those that
    began in time. OpenTelemetry reads no histograms, so a histogram becomes the counters `.count`
    and `.sum`.

    Parameters
    ----------
    consumer
        The sender of Celery's signal `worker_ready`.
    meter_provider
        By default the global one.

    Raises
    ------
    ConfigError
        If the worker runs no delayed tasks.

    Examples
    --------
    >>> @worker_ready.connect(weak=False)
    ... def set_up(sender, **_):
    ...     observe_worker(sender)
    """
    runtime = getattr(consumer.controller, "delays_runtime", None)
    if runtime is None:
        raise ConfigError(f"the worker {consumer.hostname} runs no delayed tasks")
    _make(runtime.metrics, list(runtime.metrics.families()), meter_provider)


def _make(source: Source, families: Iterable[Family], provider: MeterProvider | None) -> None:
    """Make an instrument for each of the families, whose values the source returns."""
    meter = get_meter("delaytasks", meter_provider=provider)
    for family in families:
        unit = "s" if family.name.endswith("_seconds") else "1"
        name = family.name.removesuffix("_seconds").replace("delaytasks_", "delaytasks.", 1)
        if family.kind == "histogram":
            count, total = _callback(source, family, _count), _callback(source, family, _sum)
            meter.create_observable_counter(f"{name}.count", [count], "1", family.about)
            meter.create_observable_counter(f"{name}.sum", [total], unit, family.about)
        elif family.kind == "counter":
            number = _callback(source, family, _number)
            meter.create_observable_counter(name, [number], unit, family.about)
        else:
            number = _callback(source, family, _number)
            meter.create_observable_gauge(name, [number], unit, family.about)


def _number(sample: Sample) -> float:
    assert not isinstance(sample.value, HistogramValue)
    return sample.value


def _count(sample: Sample) -> float:
    assert isinstance(sample.value, HistogramValue)
    return sum(sample.value.counts)


def _sum(sample: Sample) -> float:
    assert isinstance(sample.value, HistogramValue)
    return sample.value.sum


def _callback(source: Source, of: Family, value_of: Callable[[Sample], float]) -> ObserveValues:
    maker = os.getpid()

    def values(_: CallbackOptions) -> Iterator[Observation]:
        if os.getpid() != maker:
            return  # a process of the pool that was forked later has the instruments, too
        for family in source.families():
            if family.name != of.name:
                continue
            for sample in family.samples:
                attributes = dict(zip(family.labels, sample.labels, strict=True))
                named = {f"delaytasks.{k}": v for k, v in attributes.items()}
                yield Observation(value_of(sample), named)

    return values
