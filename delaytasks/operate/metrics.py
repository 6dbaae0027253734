"""The metrics of one process, and how Prometheus gets them: over HTTP or in a file.

The main process of a worker knows what the processes of its pool have run. `exporter.py` has the
metrics of a deployment, and `monitoring` the dashboard and the alert rules. All but these files
need the extra `prometheus`. See docs/metrics.md.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.clock import reset_in_child
from delaytasks.model.errors import ConfigError
from delaytasks.model.moves import LATE_S, late_start
from delaytasks.run.observers import DURATION_BOUNDS_S, LATENESS_BOUNDS_S, OTHER_TAGS, RunCounts
from delaytasks.settings import Address

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.exposition import write_to_textfile
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.metrics_core import Metric as Metric
    from prometheus_client.registry import Collector as Collector
except ImportError as missing:
    raise ConfigError(
        "metrics for Prometheus need prometheus_client: pip install 'delaytasks[prometheus]'"
    ) from missing

#: The values of the labels, and the value.
Samples = Iterable[tuple[tuple[object, ...], float]]


def gauge(name: str, about: str, value: float | None) -> Metric:
    """Return a metric without labels, and without a value if that is None."""
    return gauges(name, about, [] if value is None else [((), value)])


def gauges(name: str, about: str, samples: Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, about, labels=labels), samples)


def counters(name: str, about: str, samples: Samples, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=labels), samples)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        metric.add_metric([str(label) for label in labels], float(value))
    return metric


def histograms(
    name: str,
    about: str,
    bounds: Sequence[float],
    samples: Iterable[tuple[tuple[str, ...], Sequence[int], float]],
    *labels: str,
) -> Metric:
    """Return counted times: for each sample its labels, the counts, and the sum of the times.

    There is one count more than `bounds`, for all longer times.
    """
    metric = HistogramMetricFamily(name, about, labels=labels)
    names = [*map(repr, bounds), "+Inf"]
    for values, counts, total in samples:
        reached = map(float, accumulate(counts))
        metric.add_metric(values, list(zip(names, reached, strict=True)), total)
    return metric


def registry_of(source: Collector) -> CollectorRegistry:
    """Return a registry with the metrics of this source only."""
    registry = CollectorRegistry()
    registry.register(source)
    return registry


def serve(host: str, port: int, source: Collector) -> Callable[[], None]:
    """Serve the metrics over HTTP in a thread. Return a function that ends it.

    Raises
    ------
    OSError
        If the port is in use.
    """
    server, thread = start_http_server(port, host, registry_of(source))

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


#: The bounds of the buckets of sweeps.
SWEEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

#: The events that are shown before the first of them, since a rate counts none that comes with the
#: first sample.
FAULT_EVENTS = (
    "chunk.failed",
    "loop.failed",
    "message.refused",
    "store.down",
    "sweep.self",
    "task.lease_lost",
    "task.recovered",
    "task.timed_out",
    "timer.down",
    "worker.lost",
)


class SweepTimes:
    """Adds up how long the sweeps of this process took. A subscriber of events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(SWEEP_BOUNDS_S) + 1)
        self._sum = 0.0

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        if name != "sweep.done":
            return
        seconds = fields["seconds"]
        bucket = sum(seconds > bound for bound in SWEEP_BOUNDS_S)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += seconds

    def metric(self) -> Metric:
        about = "How long the sweeps of this worker took."
        with self._lock:
            sample = (), self._counts, self._sum
            return histograms("delaytasks_sweep_seconds", about, SWEEP_BOUNDS_S, [sample])


class WorkerMetrics(Collector):
    """Reads the state of a worker. Each call costs some microseconds for each tag, and no query.

    Parameters
    ----------
    info
        Returns what `celery inspect stats` shows.
    totals
        Returns the counts of each tag since the start of the worker.
    processes
        Returns the number of chunks that the pool can run at once.
    sweep_times
        Subscribed to the events of the worker.
    """

    def __init__(
        self,
        info: Callable[[], Mapping[str, Any]],
        totals: Callable[[], Mapping[str, RunCounts]],
        processes: Callable[[], int],
        sweep_times: SweepTimes,
    ) -> None:
        self._info = info
        self._totals = totals
        self._processes = processes
        self._sweep_times = sweep_times

    def collect(self) -> Iterator[Metric]:
        yield from run_metrics(self._totals())
        info = self._info()
        about = "Whether the broker, or the Redis of the timer `redis`, took the last message."
        yield gauge("delaytasks_timer_up", about, info["timer_is_up"])
        about = "Entries in the worker's memory, which wait for their due time."
        yield gauge("delaytasks_wheel_entries", about, info["held"])
        about = "Due entries in the worker's memory, which wait for a process."
        yield gauge("delaytasks_ready_entries", about, info["waiting"])
        about = "Processes or threads of the pool."
        yield gauge("delaytasks_pool_processes", about, self._processes())
        yield gauge("delaytasks_pool_chunks", "Chunks that the pool runs.", info["chunks"])
        loops = [item for item in info["loops"].items() if item[1]["turned_s_ago"] is not None]
        about = "The time since the last turn of a loop began."
        turned = [((name,), loop["turned_s_ago"]) for name, loop in loops]
        yield gauges("delaytasks_loop_turned_seconds", about, turned, "loop")
        yield self._sweep_times.metric()
        about = "Events of this process, as in the log."
        events = sorted({**dict.fromkeys(FAULT_EVENTS, 0), **info["events"]}.items())
        counted = [((name,), count) for name, count in events]
        yield counters("delaytasks_events", about, counted, "event")


def run_metrics(totals: Mapping[str, RunCounts]) -> Iterator[Metric]:
    """Yield the metrics of runs by tag. The worker bounds the number of tags."""
    runs = sorted(totals.items())
    started = [((tag,), counts.started) for tag, counts in runs]
    yield counters("delaytasks_runs_started", "Runs that began.", started, "tag")
    outcomes = [
        ((tag, outcome), count)
        for tag, counts in runs
        for outcome, count in counts.by_outcome().items()
    ]
    yield counters("delaytasks_runs", "Runs by outcome.", outcomes, "tag", "outcome")
    contracts = [(tag, counts) for tag, counts in runs if counts["on_time"] or counts["late"]]
    about = "Runs of tags with `on_time` that began in time."
    on_time = [((tag,), counts["on_time"]) for tag, counts in contracts]
    yield counters("delaytasks_runs_on_time", about, on_time, "tag")
    about = "Runs of tags with `on_time` that began too late."
    late = [((tag,), counts["late"]) for tag, counts in contracts]
    yield counters("delaytasks_runs_late", about, late, "tag")
    about = (
        f"Runs that began more than {LATE_S:g} s late, by what brought their rows, and by why they "
        "did not begin earlier."
    )
    starts = [
        ((tag, *late_start(late_by)), count)
        for tag, counts in runs
        for late_by, count in sorted(counts.late_starts.items())
    ]
    yield counters("delaytasks_late_starts", about, starts, "tag", "brought_by", "reason")
    about = "Time from the due time of a task to the start of its run."
    times = [((tag,), c.lateness, c["lateness_s"]) for tag, c in runs]
    yield histograms("delaytasks_run_lateness_seconds", about, LATENESS_BOUNDS_S, times, "tag")
    times = [((tag,), c.duration, c["duration_s"]) for tag, c in runs]
    about = "Duration of runs."
    yield histograms("delaytasks_run_duration_seconds", about, DURATION_BOUNDS_S, times, "tag")


class ProducerMetrics(Collector):
    """Counts by tag what this process schedules from now on. A subscriber of events.

    Parameters
    ----------
    max_tags
        All tags after this many are counted as one.
    """

    def __init__(self, max_tags: int) -> None:
        self._max_tags = max_tags
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        """Begin again at zero: the parent process reports its own counts."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(cls, delays: DelayTasks) -> ProducerMetrics:
        runtime = delays._runtime
        metrics = cls(runtime.settings.statistics_tags)
        runtime.events.subscribe(metrics)
        return metrics

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        if name != "task.scheduled":
            return
        tag = fields["tag"]
        with self._lock:
            is_named = tag in self._counts or len(self._counts) < self._max_tags
            self._counts[tag if is_named else OTHER_TAGS] += fields.get("count", 1)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts = self._counts.copy()
        about = "Tasks that this process has scheduled since it registered this metric."
        yield counters(
            "delaytasks_scheduled", about, [((tag,), n) for tag, n in counts.items()], "tag"
        )


# -- Serve them as the setting `metrics` asks for ------------------------------------------------


#: How often the file is written.
FILE_S = 10.0
#: How often a port is tried that is in use: the worker before this one may still have it.
PORT_S = 10.0


class MetricsEndpoint:
    """Serves metrics as the setting `metrics` asks for.

    Parameters
    ----------
    place
        The address, or the path of the file, in which the worker's name has replaced its
        placeholders.
    events
        Gets `metrics.not_served` once if the port is in use, which is then tried again.
    source
        The metrics.
    """

    def __init__(self, place: Address | str, events: Events, source: Collector) -> None:
        self._place = place
        self._events = events
        self._source = source
        self._stop_server: Callable[[], None] | None = None
        self._is_reported = False
        if isinstance(place, Address):
            loop = Loop("metrics_server", partial(self._serve, place), events)
        else:
            loop = Loop("metrics_writer", partial(self._write, place), events)
        #: The loop, which the worker starts.
        self.loop = loop

    def stop(self) -> None:
        self.loop.stop()
        if self._stop_server is not None:
            self._stop_server()
        if not isinstance(self._place, Address):
            self._events.attempt("metrics", "last", partial(self._write, self._place))

    def _serve(self, address: Address) -> float | None:
        """Serve at the port; return when to try again, or None."""
        try:
            self._stop_server = serve(*address, self._source)
        except OSError as error:  # a worker without metrics is better than no worker
            if not self._is_reported:
                self._events.emit("metrics.not_served", address=str(address), error=str(error))
            self._is_reported = True
            return PORT_S
        return None

    def _write(self, path: str) -> float:
        # The file is replaced as a whole, so that no reader sees half of it.
        write_to_textfile(os.fspath(path), registry_of(self._source))
        return FILE_S
