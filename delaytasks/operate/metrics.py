"""What Prometheus gets: the metrics of a worker and of a deployment.

The main process of a worker knows what the processes of its pool have run. An exporter reads the
tables. The folder `deployment/monitoring` has a dashboard and alert rules that use these metrics.
This module needs the extra `prometheus`. See docs/monitor.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.errors import StoreError
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.text import needs_extra
from delaytasks.operate.serving import SharedCache
from delaytasks.operate.state import NO_STANDBY, READ_ONLY, DeploymentState, ask_broker
from delaytasks.run.observers import DURATION_BOUNDS_S, LATENESS_BOUNDS_S, RunCounts
from delaytasks.settings import Address

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.runtime import Runtime
    from delaytasks.worker.worker_runtime import WorkerRuntime

with needs_extra("prometheus", "an endpoint for Prometheus"):
    from prometheus_client import CollectorRegistry, Histogram, make_wsgi_app, start_http_server
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
#: A value, or the values by the label or by a tuple of labels. None if there is none now.
Values = float | Mapping[Any, float | None] | None


def _metric(family: Any, name: str, about: str, values: Values, *labels: str) -> Any:
    metric = family(f"delaytasks_{name}", about, labels=labels)
    for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
        if value is not None:
            metric.add_metric([key] if isinstance(key, str) else key, float(value))
    return metric


gauge, counter = partial(_metric, GaugeMetricFamily), partial(_metric, CounterMetricFamily)


# -- The metrics of a worker ----------------------------------------------------------------------


#: The bounds of the buckets of sweeps.
SWEEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

#: The events that are shown before the first of them, since a rate counts none that comes with the
#: first sample.
FAULT_EVENTS = (
    "chunk.failed loop.failed message.refused store.down sweep.self task.lease_lost "
    "task.recovered task.timed_out timer.down worker.lost"
).split()


class WorkerMetrics(Collector):
    """Reads the state of a worker. Each call costs some microseconds for each tag, and no query."""

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker
        about = "How long the sweeps of this worker took."
        self._sweeps = Histogram(
            "delaytasks_sweep_seconds", about, buckets=SWEEP_BOUNDS_S, registry=None
        )
        worker.events.subscribe(self._observe)

    def _observe(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "sweep.done":
            self._sweeps.observe(fields["seconds"])

    def collect(self) -> Iterator[Metric]:
        statistics, pool = self._worker.statistics, self._worker.celery_worker.pool
        yield from run_metrics({} if statistics is None else statistics.totals())
        yield from self._sweeps.collect()
        info = self._worker.info()
        about = "Whether the broker, or the Redis of the timer `redis`, took the last message."
        yield gauge("timer_up", about, info["timer_is_up"])
        about = "Entries in the worker's memory, which wait for their due time."
        yield gauge("wheel_entries", about, info["held"])
        about = "Due entries in the worker's memory, which wait for a process."
        yield gauge("ready_entries", about, info["waiting"])
        yield gauge("pool_processes", "Processes or threads of the pool.", int(pool.limit or 1))
        yield gauge("pool_chunks", "Chunks that the pool runs.", info["chunks"])
        turned = {name: loop["turned_s_ago"] for name, loop in info["loops"].items()}
        about = "The time since the last turn of a loop began."
        yield gauge("loop_turned_seconds", about, turned, "loop")
        events = {**dict.fromkeys(FAULT_EVENTS, 0), **info["events"]}
        about = "Events of this process, as in the log."
        yield counter("events", about, dict(sorted(events.items())), "event")


def run_metrics(totals: Mapping[str, RunCounts]) -> Iterator[Metric]:
    """Yield the metrics of runs by tag. The worker bounds the number of tags."""
    runs = sorted(totals.items())
    started = {tag: counts.started for tag, counts in runs}
    yield counter("runs_started", "Runs that began.", started, "tag")
    outcomes = {
        (tag, outcome): number
        for tag, counts in runs
        for outcome, number in counts.by_outcome().items()
    }
    yield counter("runs", "Runs by outcome.", outcomes, "tag", "outcome")
    late = "Time from the due time of a task to the start of its run."
    for name, bounds, about in (
        ("lateness", LATENESS_BOUNDS_S, late),
        ("duration", DURATION_BOUNDS_S, "Duration of runs."),
    ):
        times = HistogramMetricFamily(f"delaytasks_run_{name}_seconds", about, labels=["tag"])
        ends = [*map(repr, bounds), "+Inf"]
        for tag, counts in runs:
            reached = map(float, accumulate(getattr(counts, name)))
            times.add_metric([tag], list(zip(ends, reached, strict=True)), counts[f"{name}_s"])
        yield times


# -- The metrics of a deployment ------------------------------------------------------------------


#: The values are read again after this time, or later if the reading took long: with millions of
#: overdue rows the queries take seconds. The return of a database that was down is soon visible.
REST_S = 4.0
#: The most queues and the most workers that get labels.
MAX_QUEUES, MAX_WORKERS = 100, 100


class DatabaseMetrics(Collector):
    """Reads the database. Scrapes within a few seconds get the same values.

    Any number of threads may call it: one of them reads, and the others wait for its values.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._cache = SharedCache()

    def collect(self) -> Iterator[Metric]:
        runtime = self._runtime
        found: DeploymentState | None = None
        with suppress(StoreError):  # the value 0 of `delaytasks_database_up` reports it
            found = self._cache.get("state", REST_S, lambda: DeploymentState(runtime))
        yield gauge("database_up", "Whether the database answers.", found is not None)
        if found is not None:
            yield from table_metrics(found)
        if runtime.direct_timer is None:
            error = self._cache.get("broker", REST_S, lambda: ask_broker(runtime))
            yield gauge("broker_up", "Whether the broker answers.", error is None)
        if (timer := runtime.redis_timer) is not None:
            is_up = self._cache.get("redis", REST_S, timer.is_reachable)
            yield gauge("redis_timer_up", "Whether the Redis of the timer answers.", is_up)


def table_metrics(found: DeploymentState) -> Iterator[Metric]:
    """Yield what the tables contain."""
    problems = {"read_only": READ_ONLY, "no_standby": NO_STANDBY}
    about = "1 if the database cannot be written, or lacks the standby that its commits wait for."
    has = {name: found.problem == problem for name, problem in problems.items()}
    yield gauge("database_problem", about, has, "problem")
    about = "Rows of each status. Numbers above a million, and that of DONE then, are estimates."
    yield gauge("tasks", about, found.rows, "status")
    about = "Waiting tasks that are later than the grace period."
    yield gauge("overdue_tasks", about, found.overdue)
    about = "How late the oldest overdue task is; 0 if no task is overdue."
    yield gauge("oldest_overdue_seconds", about, found.oldest_overdue_s)
    about = "Overdue tasks of the largest groups, at most 20."
    late = {(group.queue, group.tag): group.tasks for group in found.late}
    yield gauge("overdue_tasks_by_tag", about, late, "queue", "tag")
    about = "Running tasks whose lease has ended. The next sweep recovers them."
    yield gauge("expired_leases", about, found.expired_leases)
    about = "Time since the last sweep of each sweep partition."
    ages = {str(each.partition): inf if each.age_s is None else each.age_s for each in found.sweeps}
    yield gauge("sweep_age_seconds", about, ages, "sweep_partition")

    yield gauge("workers", "Workers that report to the database.", len(found.alive))
    about = "Live workers of each queue that is served or has overdue tasks."
    served = {queue for worker in found.alive for queue in worker.queues} - {ALL_QUEUES}
    queues = [*dict.fromkeys([group.queue for group in found.late] + sorted(served))]
    serving = {name: len(found.serving(name)) for name in queues[:MAX_QUEUES]}
    yield gauge("queue_workers", about, serving, "queue")
    shown = found.workers[:MAX_WORKERS]
    about = "How far the clock of a worker's machine is ahead of the database's clock."
    offsets = {worker.name: worker.clock_offset_s for worker in shown}
    yield gauge("worker_clock_offset_seconds", about, offsets, "worker")
    services = {worker.name: worker.services for worker in shown if worker.is_alive}
    about = "Time since a live worker lost its broker; 0 while it is connected."
    down = {name: each.broker_down_s or 0.0 for name, each in services.items()}
    yield gauge("worker_broker_down_seconds", about, down, "worker")
    about = "Time since the timer of a live worker accepts no tasks; 0 while it does."
    down = {name: each.timer_down_s or 0.0 for name, each in services.items()}
    yield gauge("worker_timer_down_seconds", about, down, "worker")
    about = "Time since a worker received beat's last message; absent if no worker can receive one."
    yield gauge("beat_age_seconds", about, found.beat_age_s)


# -- Show them over HTTP --------------------------------------------------------------------------


def registry_of(source: Collector) -> CollectorRegistry:
    """Return a registry with the metrics of this source only."""
    registry = CollectorRegistry()
    registry.register(source)
    return registry


def exporter_app(delays: DelayTasks) -> WSGIApp:
    """Return a WSGI application that answers with the metrics of the database.

    Parameters
    ----------
    delays
        A `DelayTasks`.

    Returns
    -------
    callable
        The application. It answers to any path, so mount it under `/metrics`.

    Raises
    ------
    ConfigError
        If `prometheus_client` is not installed.

    Examples
    --------
    >>> application = DispatcherMiddleware(site, {"/metrics": exporter_app(delays)})
    """
    app: WSGIApp = make_wsgi_app(registry_of(DatabaseMetrics(delays._runtime)))
    return app


#: How often a port is tried that is in use: the worker before this one may still have it.
PORT_S = 10.0


class MetricsEndpoint:
    """Serves the metrics of a worker as the setting `metrics` asks for.

    Parameters
    ----------
    address
        The address.
    events
        Gets `metrics.not_served` once if the port is in use, which is then tried again.
    source
        The metrics.
    """

    def __init__(self, address: Address, events: Events, source: Collector) -> None:
        self._address = address
        self._events = events
        self._registry = registry_of(source)
        self._server: Any = None
        self._is_reported = False
        #: The loop, which the worker starts.
        self.loop = Loop("metrics_server", self._serve, events)

    def stop(self) -> None:
        self.loop.stop()
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def _serve(self) -> float | None:
        """Serve at the port; return when to try again, or None."""
        host, port = self._address
        try:
            self._server = start_http_server(port, host, self._registry)
        except OSError as error:  # a worker without metrics is better than no worker
            if not self._is_reported:
                address = str(self._address)
                self._events.emit("metrics.not_served", address=address, error=str(error))
            self._is_reported = True
            return PORT_S
        return None
