"""The metrics of one process: what a worker has run, and what a producer has scheduled.

The main process of a worker knows what the processes of its pool have run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from delaytasks.metrics import Family, HistogramValue, Sample, gauge
from delaytasks.model.clock import reset_in_child
from delaytasks.model.moves import LATE_S, late_start
from delaytasks.run.run_counts import DURATION_BOUNDS_S, LATENESS_BOUNDS_S, OTHER_TAGS, RunCounts

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks

#: The bounds of the buckets of sweeps.
SWEEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

#: The events that are shown before the first of them, since a rate counts none that comes with the
#: first sample.
FAULT_EVENTS = (
    "chunk.failed",
    "loop.failed",
    "loop.restarted",
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

    def value(self) -> HistogramValue:
        with self._lock:
            return HistogramValue(SWEEP_BOUNDS_S, tuple(self._counts), self._sum)


class WorkerMetrics:
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

    def families(self) -> Iterator[Family]:
        yield from run_families(self._totals())
        info = self._info()
        yield gauge(
            "delaytasks_timer_up",
            "Whether the broker, or the Redis of the timer `redis`, took the last message.",
            info["timer_is_up"],
        )
        about = "Entries in the worker's memory, which wait for their due time."
        yield gauge("delaytasks_wheel_entries", about, info["held"])
        about = "Due entries in the worker's memory, which wait for a process."
        yield gauge("delaytasks_ready_entries", about, info["waiting"])
        about = "Processes or threads of the pool."
        yield gauge("delaytasks_pool_processes", about, self._processes())
        yield gauge("delaytasks_pool_chunks", "Chunks that the pool runs.", info["chunks"])
        yield from self._loops(info["loops"])
        yield Family(
            "delaytasks_sweep_seconds",
            "How long the sweeps of this worker took.",
            "histogram",
            (),
            [Sample((), self._sweep_times.value())],
        )
        yield event_family(info["events"])

    @staticmethod
    def _loops(loops: Mapping[str, Mapping[str, Any]]) -> Iterator[Family]:
        """Yield the state of the loops of the worker's main process."""
        yield Family(
            "delaytasks_loop_alive",
            "Whether the thread of a loop lives.",
            "gauge",
            ("loop",),
            [Sample((name,), float(loop["is_alive"])) for name, loop in loops.items()],
        )
        yield Family(
            "delaytasks_loop_restarts",
            "How often the watchdog has replaced a loop.",
            "counter",
            ("loop",),
            [Sample((name,), loop["restarts"]) for name, loop in loops.items()],
        )


def event_family(counts: Mapping[str, int]) -> Family:
    """Return the metric of the events of a worker's main process."""
    counts = {**dict.fromkeys(FAULT_EVENTS, 0), **counts}
    return Family(
        "delaytasks_events",
        "Events of this process, as in the log.",
        "counter",
        ("event",),
        [Sample((name,), count) for name, count in sorted(counts.items())],
    )


def run_families(totals: Mapping[str, RunCounts]) -> Iterator[Family]:
    """Yield the metrics of runs by tag. The worker bounds the number of tags."""
    runs = sorted(totals.items())
    yield _counter("delaytasks_runs_started", "Runs that began.", runs, lambda c: c.started)
    yield Family(
        "delaytasks_runs",
        "Runs by outcome.",
        "counter",
        ("tag", "outcome"),
        [
            Sample((tag, outcome), count)
            for tag, counts in runs
            for outcome, count in counts.by_outcome().items()
        ],
    )
    contracts = [(tag, counts) for tag, counts in runs if counts.on_time or counts.late]
    about = "Runs of tags with `on_time` that began in time."
    yield _counter("delaytasks_runs_on_time", about, contracts, lambda c: c.on_time)
    about = "Runs of tags with `on_time` that began too late."
    yield _counter("delaytasks_runs_late", about, contracts, lambda c: c.late)
    yield Family(
        "delaytasks_late_starts",
        f"Runs that began more than {LATE_S:g} s late, by what brought their rows, and by why they "
        "did not begin earlier.",
        "counter",
        ("tag", "brought_by", "reason"),
        [
            Sample((tag, *late_start(late_by)), count)
            for tag, counts in runs
            for late_by, count in sorted(counts.late_starts.items())
        ],
    )
    yield Family(
        "delaytasks_run_lateness_seconds",
        "Time from the due time of a task to the start of its run.",
        "histogram",
        ("tag",),
        [
            Sample((tag,), HistogramValue(LATENESS_BOUNDS_S, tuple(c.lateness), c.lateness_s))
            for tag, c in runs
        ],
    )
    yield Family(
        "delaytasks_run_duration_seconds",
        "Duration of runs.",
        "histogram",
        ("tag",),
        [
            Sample((tag,), HistogramValue(DURATION_BOUNDS_S, tuple(c.duration), c.duration_s))
            for tag, c in runs
        ],
    )


def _counter(
    name: str, about: str, runs: Sequence[tuple[str, RunCounts]], value: Callable[[RunCounts], int]
) -> Family:
    samples = [Sample((tag,), value(counts)) for tag, counts in runs]
    return Family(name, about, "counter", ("tag",), samples)


class ProducerMetrics:
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

    def families(self) -> Iterator[Family]:
        with self._lock:
            counts = self._counts.copy()
        yield Family(
            "delaytasks_scheduled",
            "Tasks that this process has scheduled since it registered this metric.",
            "counter",
            ("tag",),
            [Sample((tag,), count) for tag, count in counts.items()],
        )
