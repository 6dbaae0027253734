"""The metrics of the database, the broker and the timer of a deployment, and of its forecast."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from delaytasks.loops import Latest
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import StoreError
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.workers import RegisteredWorker
from delaytasks.operate.forecast import Forecast, make_forecast
from delaytasks.operate.metrics import Collector, Metric, gauge, gauges, registry_of
from delaytasks.operate.state import DeploymentState, ask_broker, beat_age_s, read_tables

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.runtime import Runtime

WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_FORECAST_METRICS = {
    "delaytasks_forecast_age_seconds": "How old the forecast is.",
    "delaytasks_forecast_peak_utilization": (
        "The share of the busiest hour of the next week for which its tasks keep the processes "
        "busy. Above 1, tasks start late."
    ),
    "delaytasks_forecast_peak_tasks": "Tasks that are due in this hour.",
    "delaytasks_forecast_peak_in_seconds": "Time until this hour begins; 0 if it has begun.",
}


def peak_metrics(recent: tuple[Forecast, float] | None) -> Iterator[Metric]:
    """Yield the metrics of a forecast. They have no values if there is none."""
    for (name, about), value in zip(_FORECAST_METRICS.items(), _values(recent), strict=True):
        yield gauge(name, about, value)


def _values(recent: tuple[Forecast, float] | None) -> tuple[float | None, ...]:
    """Return the values of the metrics, in the order of `_FORECAST_METRICS`."""
    if recent is None:
        return (None,) * len(_FORECAST_METRICS)
    forecast, age_s = recent
    peak = forecast.peak
    if peak is None:
        return age_s, 0.0, 0, None
    ahead_s = (peak.start - forecast.made_at).total_seconds() - age_s
    return age_s, peak.utilization, peak.due, max(ahead_s, 0.0)


#: The values are read again after this time, and after their reading's duration times
#: `REST_SHARE`: with millions of overdue rows the queries take seconds. The latter is at most
#: `MAX_REST_S`, and does not count if a database was down, whose return must soon be visible.
REST_S, REST_SHARE, MAX_REST_S = 4.0, 20, 60.0
#: The most queues and the most workers that get labels.
MAX_QUEUES, MAX_WORKERS = 100, 100


class DatabaseMetrics(Collector):
    """Reads the database. Scrapes within a few seconds get the same values.

    Any number of threads may call it: one of them reads, and the others wait for its values.

    Parameters
    ----------
    runtime
        The objects behind a `DelayTasks`.
    rest_s
        The shortest time between two readings.
    """

    def __init__(self, runtime: Runtime, rest_s: float = REST_S) -> None:
        self._runtime = runtime
        self._rest_s = rest_s
        self._forecast = Latest("forecast", lambda: make_forecast(runtime))
        self._lock = threading.Lock()
        self._metrics: Sequence[Metric] = ()
        self._is_up = True
        self._is_read_again_at = float("-inf")

    def collect(self) -> Sequence[Metric]:
        with self._lock:
            began = monotonic()
            if began >= self._is_read_again_at:
                self._metrics = list(self._read())
                now, rest_s = monotonic(), self._rest_s
                if self._is_up:
                    rest_s = max(rest_s, min(REST_SHARE * (now - began), MAX_REST_S))
                self._is_read_again_at = now + rest_s
            return self._metrics

    def _read(self) -> Iterator[Metric]:
        runtime, found = self._runtime, None
        try:
            found = read_tables(runtime.store, runtime.settings)
        except StoreError:
            pass  # the value 0 of `delaytasks_database_up` reports it
        self._is_up = found is not None
        yield gauge("delaytasks_database_up", "Whether the database answers.", self._is_up)
        yield from table_metrics(found)
        yield from peak_metrics(self._forecast.get() if found is not None else None)
        if runtime.direct_timer is None:
            is_up = ask_broker(runtime) is None
            yield gauge("delaytasks_broker_up", "Whether the broker answers.", is_up)
        if runtime.redis_timer is not None:
            served = set() if found is None else queue_workers(found).keys() - {ALL_QUEUES}
            queues = sorted({runtime.settings.default_queue, *served})[:MAX_QUEUES]
            yield from _redis_timer(runtime.redis_timer.counts(queues))


def _redis_timer(counts: Mapping[str, tuple[int, int]] | None) -> Iterator[Metric]:
    """Yield the metrics of the timer `redis`. `counts` is None if its Redis does not answer."""
    about = "Whether the Redis of the timer answers."
    yield gauge("delaytasks_redis_timer_up", about, counts is not None)
    about = "Entries of near tasks in Redis that wait, or that a worker has taken."
    entries = [
        ((queue, state), number)
        for queue, numbers in (counts or {}).items()
        for state, number in zip(("waiting", "taken"), numbers, strict=True)
    ]
    yield gauges("delaytasks_redis_timer_entries", about, entries, "queue", "state")


def _live_workers(state: DeploymentState) -> list[RegisteredWorker]:
    """Return the live ones of the first workers by name."""
    return [worker for worker in state.workers[:MAX_WORKERS] if worker.is_alive]


def queue_workers(state: DeploymentState) -> dict[str, int]:
    """Return how many live workers serve each queue that is served or has overdue tasks."""
    alive = [worker for worker in state.workers if worker.is_alive]
    served = Counter(queue for worker in alive for queue in worker.queues)
    of_all = served.pop(ALL_QUEUES, 0)
    names = [group.queue for group in state.late] + sorted(served)
    return {name: served[name] + of_all for name in list(dict.fromkeys(names))[:MAX_QUEUES]}


#: The gauges of the tables: the name, the help, the samples, and the names of the labels.
_OF_TABLES: Sequence[tuple[Any, ...]] = (
    (
        "delaytasks_tasks",
        "Rows of each status. Numbers above a million, and that of DONE then, are estimates.",
        lambda one: (((status.name,), count.rows) for status, count in one.counts.items()),
        "status",
    ),
    (
        "delaytasks_overdue_tasks",
        "Waiting tasks that are later than the grace period.",
        lambda one: [((), one.overdue)],
    ),
    (
        "delaytasks_oldest_overdue_seconds",
        "How late the oldest overdue task is; 0 if no task is overdue.",
        lambda one: [((), one.oldest_overdue_s)],
    ),
    (
        "delaytasks_overdue_tasks_by_tag",
        "Overdue tasks of the largest groups, at most 20.",
        lambda one: (((group.queue, group.tag), group.tasks) for group in one.late),
        "queue",
        "tag",
    ),
    (
        "delaytasks_expired_leases",
        "Running tasks whose lease has ended. The next sweep recovers them.",
        lambda one: [((), one.expired_leases)],
    ),
    (
        "delaytasks_sweep_age_seconds",
        "Time since the last sweep of each sweep partition.",
        lambda one: (
            ((each.partition,), inf if each.age_s is None else each.age_s) for each in one.sweeps
        ),
        "sweep_partition",
    ),
    (
        "delaytasks_paused_policies",
        "Tags and queues that are paused.",
        lambda one: [((), len(one.paused))],
    ),
    (
        "delaytasks_snapshot_seconds",
        "How long the queries of these metrics took.",
        lambda one: [((), one.read_s)],
    ),
    (
        "delaytasks_workers",
        "Workers that report to the database.",
        lambda one: [((), sum(worker.is_alive for worker in one.workers))],
    ),
    (
        "delaytasks_queue_workers",
        "Live workers of each queue that is served or has overdue tasks.",
        lambda one: (((queue,), number) for queue, number in queue_workers(one).items()),
        "queue",
    ),
    (
        "delaytasks_worker_seen_seconds",
        "Time since the last report of each worker, at most 100 workers.",
        lambda one: (((worker.name,), worker.age_s) for worker in one.workers[:MAX_WORKERS]),
        "worker",
    ),
    (
        "delaytasks_worker_clock_offset_seconds",
        "How far the clock of a worker's machine is ahead of the database's clock.",
        lambda one: (
            ((worker.name,), worker.clock_offset_s) for worker in one.workers[:MAX_WORKERS]
        ),
        "worker",
    ),
    (
        "delaytasks_worker_broker_down_seconds",
        "Time since a live worker lost its broker; 0 while it is connected.",
        lambda one: (
            ((each.name,), each.services.broker_down_s or 0.0) for each in _live_workers(one)
        ),
        "worker",
    ),
    (
        "delaytasks_worker_timer_down_seconds",
        "Time since the timer of a live worker accepts no tasks; 0 while it does.",
        lambda one: (
            ((each.name,), each.services.timer_down_s or 0.0) for each in _live_workers(one)
        ),
        "worker",
    ),
    (
        "delaytasks_beat_age_seconds",
        "Time since a worker received beat's last message; absent if no worker can receive one.",
        lambda one: [] if (age_s := beat_age_s(one.workers)) is None else [((), age_s)],
    ),
)


def table_metrics(found: DeploymentState | None) -> Iterator[Metric]:
    """Yield the metrics of the tables; without values if `found` is None."""
    for name, about, samples, *labels in _OF_TABLES:
        yield gauges(name, about, () if found is None else samples(found), *labels)


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
    from prometheus_client import make_wsgi_app

    app: WSGIApp = make_wsgi_app(registry_of(DatabaseMetrics(delays._runtime)))
    return app
