"""Combines what is due with the workers: the numbers and the lateness of each step and tag."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from delaytasks.core.clock import from_us
from delaytasks.forecast.due_counts import DueCount
from delaytasks.forecast.pools import WorkerPool
from delaytasks.forecast.rates import TagRate
from delaytasks.forecast.result import ForecastPool, ForecastStep, TagForecast
from delaytasks.forecast.simulation import Arrival, Load, Served, lateness_s, load_of, simulate

#: The most workers that are considered.
MAX_WORKERS_TRIED = 10_000
#: A number of tasks that is smaller is a rounding error.
SMALL = 0.5


@dataclass
class _Step:
    """One step while it is being computed."""

    due: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    late_s: float = 0.0
    late_s_doubled: float = 0.0
    late_s_served: float = 0.0
    #: The numbers of tasks that arrive and that start in this step, of those that workers run.
    arrived: float = 0.0
    started: float = 0.0


class TimeSteps:
    """The steps and tags of a forecast.

    Parameters
    ----------
    begin_s, end_s
        The time of the forecast, in seconds since 1970.
    step_s
        The length of a step.
    rates
        The needs of each tag.
    only_tag
        The tag whose numbers are returned; None for all tags. The others are simulated, too.
    """

    def __init__(
        self,
        begin_s: float,
        end_s: float,
        step_s: float,
        rates: Mapping[str, TagRate],
        only_tag: str | None = None,
    ) -> None:
        self._only_tag = only_tag
        self._begin_s = begin_s
        self._step_s = step_s
        self._rates = rates
        self._first = int(begin_s // step_s)
        count = math.ceil(end_s / step_s) - self._first
        self._steps = [_Step() for _ in range(max(count, 1))]
        self._due: defaultdict[str, float] = defaultdict(float)
        self._late_s: dict[str, float] = {}
        self._paused: set[str] = set()

    # -- add --------------------------------------------------------------------------------------

    def add_paused(self, counts: Iterable[DueCount]) -> None:
        """Add tasks that do not run because their tag or queue is paused."""
        for each in counts:
            if self._is_shown(each):
                self._count(each)
                self._paused.add(each.tag)

    def add_pool(
        self, pool: WorkerPool, counts: Sequence[DueCount], target_s: float
    ) -> ForecastPool:
        """Add the tasks of queues that the same workers serve, and simulate these workers."""
        counts = sorted(counts, key=lambda each: each.second)
        load = load_of(
            [
                Arrival(max(each.second - self._begin_s, 0.0), each.tag, each.tasks, each.length_s)
                for each in counts
            ],
            {tag: rate.service for tag, rate in self._rates.items()},
        )
        served = simulate(load, pool.processes)
        doubled = _lateness(load, simulate(load, 2 * pool.processes))
        late = _lateness(load, served)
        for each, index in zip(counts, load.batch_of, strict=True):
            if not self._is_shown(each):
                continue
            step = self._count(each)
            step.late_s = max(step.late_s, late[index])
            step.late_s_doubled = max(step.late_s_doubled, doubled[index])
            self._late_s[each.tag] = max(self._late_s.get(each.tag, 0.0), late[index])
            if pool.workers:
                step.late_s_served = max(step.late_s_served, late[index])
                step.arrived += each.tasks
                self._start(served[index], each.tasks)
        return ForecastPool(
            queues=tuple(sorted(pool.queues)),
            workers=pool.workers,
            processes=round(pool.processes),
            late_s=_finite(max(late, default=0.0)),
            needed_workers=_needed_workers(load, pool.processes_each, target_s),
        )

    def _is_shown(self, each: DueCount) -> bool:
        return self._only_tag in (None, each.tag)

    def _count(self, each: DueCount) -> _Step:
        step = self._steps[self._index(each.second)]
        step.due[each.tag] += each.tasks
        self._due[each.tag] += each.tasks
        return step

    def _index(self, second: float) -> int:
        index = int(second // self._step_s) - self._first
        return min(max(index, 0), len(self._steps) - 1)

    def _start(self, served: Served, tasks: float) -> None:
        """Distribute the starts of tasks over the steps in which they take place."""
        first_s, last_s = self._begin_s + served.first_s, self._begin_s + served.last_s
        first = int(first_s // self._step_s) - self._first
        last = int(last_s // self._step_s) - self._first
        if first == last or last_s <= first_s:
            if first < len(self._steps):
                self._steps[max(first, 0)].started += tasks
            return
        for index in range(first, min(last, len(self._steps) - 1) + 1):
            begin_s = (self._first + index) * self._step_s
            part_s = min(last_s, begin_s + self._step_s) - max(first_s, begin_s)
            self._steps[index].started += tasks * part_s / (last_s - first_s)

    # -- read -------------------------------------------------------------------------------------

    def steps(self) -> tuple[ForecastStep, ...]:
        found: list[ForecastStep] = []
        backlog = 0.0
        for index, step in enumerate(self._steps):
            backlog = max(backlog + step.arrived - step.started, 0.0)
            due = rounded(sum(step.due.values()))
            if due or backlog >= SMALL:
                found.append(
                    ForecastStep(
                        start=from_us(round((self._first + index) * self._step_s * 1e6)),
                        due=due,
                        due_by_tag={
                            tag: rounded(tasks)
                            for tag, tasks in sorted(step.due.items(), key=lambda item: -item[1])
                        },
                        late_s=_finite(step.late_s),
                        late_s_doubled=_finite(step.late_s_doubled),
                        late_s_served=round(step.late_s_served, 3),
                        backlog=rounded(backlog),
                    )
                )
        return tuple(found)

    def tags(self) -> tuple[TagForecast, ...]:
        found = []
        for tag, due in sorted(self._due.items(), key=lambda item: (-item[1], item[0])):
            rate = self._rates[tag]
            late_s = None if tag in self._paused else _finite(self._late_s.get(tag, 0.0))
            found.append(
                TagForecast(
                    tag,
                    rounded(due),
                    late_s,
                    rate.per_process,
                    rate.source,
                    rate.service.most_per_s,
                    tag in self._paused,
                )
            )
        return tuple(found)


def rounded(tasks: float) -> int:
    """Return a number of tasks as an integer; 1 for a part of a task."""
    return max(round(tasks), 1) if tasks > 0.001 else 0


def _needed_workers(load: Load, processes_each: float, target_s: float) -> int | None:
    """Return the smallest number of workers with which no task is later than the target."""

    def is_enough(workers: int) -> bool:
        served = simulate(load, workers * processes_each)
        return max(_lateness(load, served), default=0.0) <= target_s

    return smallest(is_enough, MAX_WORKERS_TRIED)


def smallest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` that is enough; None if `most` is not.

    If a number is enough, each larger one must be enough, too.
    """
    high = 1
    while not is_enough(high):
        if high == most:
            return None
        high = min(2 * high, most)
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def _lateness(load: Load, served: Sequence[Served]) -> list[float]:
    """Return the lateness of each batch."""
    return list(map(lateness_s, load.batches, served))


def _finite(seconds: float) -> float | None:
    return round(seconds, 3) if math.isfinite(seconds) else None
