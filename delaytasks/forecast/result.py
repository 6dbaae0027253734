"""The results of `DelayTasks.forecast`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

#: Where the duration of a tag's tasks comes from: the statistics of the workers, the call, or a
#: default, because nothing is known.
RateSource = Literal["measured", "given", "assumed"]


@dataclass(frozen=True, slots=True)
class TagForecast:
    """The tasks of one tag in the time of a forecast.

    Attributes
    ----------
    tag
        The tag.
    due
        The number of tasks that become due.
    late_s
        The longest time between the due time of a task and its start. None if no worker serves the
        queue, or the tag or queue is paused.
    rate
        The number of tasks that one process runs in a second.
    rate_source
        `"measured"`, `"given"` or `"assumed"`.
    most_per_s
        The most tasks that start in a second by the limits of the tag. None without limits.
    is_paused
        Whether the tag, or a queue with tasks of the tag, is paused.

    Examples
    --------
    >>> [(tag.tag, tag.due) for tag in delays.forecast().tags]
    [('newsletter.send', 1200000), ('mail.send', 3150)]
    """

    tag: str
    due: int
    late_s: float | None
    rate: float
    rate_source: RateSource
    most_per_s: float | None = None
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class ForecastStep:
    """One part of the time of a forecast, by default an hour.

    Attributes
    ----------
    start
        The begin of the step. Steps without tasks and without a backlog are left out.
    due
        The number of tasks that become due in the step.
    due_by_tag
        The same for each tag.
    late_s
        The longest time between the due time of a task of this step and its start. None if some
        tasks do not start at all.
    late_s_doubled
        The same with twice as many workers.
    late_s_served
        The longest time between the due time of a task of this step and its start, without the
        tasks that no worker runs.
    backlog
        The number of due tasks that have not started at the end of the step. Tasks that no worker
        runs are not included.

    Examples
    --------
    >>> step = delays.forecast().worst
    >>> step.due, step.late_s
    (1200000, 840.0)
    """

    start: datetime
    due: int
    due_by_tag: dict[str, int]
    late_s: float | None
    late_s_doubled: float | None
    late_s_served: float
    backlog: int


@dataclass(frozen=True, slots=True)
class ForecastPool:
    """The workers that serve the same queues.

    Attributes
    ----------
    queues
        The queues with tasks that these workers serve.
    workers, processes
        The number of workers, and of all their processes. Both are 0 if no worker serves the
        queues.
    late_s
        The longest time between the due time of a task and its start. None if `workers` is 0.
    needed_workers
        The smallest number of workers, each with as many processes, with which no task starts later
        than `target_s`. None if no number is enough, because of a limit.

    Examples
    --------
    >>> [(pool.queues, pool.workers, pool.needed_workers) for pool in delays.forecast().pools]
    [(('default', 'mail'), 2, 4)]
    """

    queues: tuple[str, ...]
    workers: int
    processes: int
    late_s: float | None
    needed_workers: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What becomes due in the next days, and how late it starts.

    Attributes
    ----------
    made_at, until
        The time of the forecast, and the end of the time that it covers.
    step_s
        The length of a step.
    target_s
        The lateness for which `needed_workers` is computed.
    due
        The number of tasks that become due, including the overdue ones.
    paused
        The number of these that do not run, because their tag or queue is paused.
    is_estimate
        Whether the numbers of tasks are estimates, because there are too many to count.
    steps
        The steps, in order.
    tags
        The tags, the one with the most tasks first.
    pools
        The workers, and how many are needed.
    notes
        Sentences about what the forecast assumes or leaves out.
    missing
        The numbers of the shards that cannot be reached.

    Examples
    --------
    >>> forecast = delays.forecast(days=7)
    >>> forecast.worst.start, forecast.worst.late_s, forecast.needed_workers
    (datetime.datetime(2026, 11, 30, 9, 0, tzinfo=datetime.timezone.utc), 840.0, 4)
    """

    made_at: datetime
    until: datetime
    step_s: float
    target_s: float
    due: int
    paused: int
    is_estimate: bool
    steps: tuple[ForecastStep, ...]
    tags: tuple[TagForecast, ...]
    pools: tuple[ForecastPool, ...]
    notes: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def worst(self) -> ForecastStep | None:
        """The step whose tasks start latest; of equally late steps the one with most tasks."""
        return max(self.steps, key=rank_of, default=None)

    @property
    def peak(self) -> ForecastStep | None:
        """The step whose tasks start latest, without the tasks that no worker runs."""
        return max(self.steps, key=lambda step: (step.late_s_served, step.due), default=None)

    @property
    def late_s(self) -> float | None:
        """The longest lateness of a task. None if some tasks do not start at all."""
        late = [pool.late_s for pool in self.pools]
        return None if None in late else max((each for each in late if each), default=0.0)

    @property
    def needed_workers(self) -> int | None:
        """The sum of the workers that are needed. None if no number is enough."""
        needed = [pool.needed_workers for pool in self.pools]
        return None if None in needed else sum(each for each in needed if each)

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON document."""
        document = asdict(self)
        for name in ("made_at", "until"):
            document[name] = document[name].isoformat()
        for step in document["steps"]:
            step["start"] = step["start"].isoformat()
        return {**document, "late_s": self.late_s, "needed_workers": self.needed_workers}


def rank_of(step: ForecastStep) -> tuple[bool, float, int]:
    """Order steps by their lateness, and by their numbers of tasks if these are the same."""
    return step.late_s is None, step.late_s or 0.0, step.due
