"""Gathers what `delaytasks report` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from delaytasks.cli.deployment import read_deployment
from delaytasks.core.failure_group import FailureGroup
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.operations.live import snapshot
from delaytasks.operations.state import DeploymentState
from delaytasks.statistics.results import (
    GaugePoint,
    OnTime,
    RunTotals,
    SeriesPoint,
)
from delaytasks.wiring import wiring_of

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks

#: Steps of a chart.
MOST_STEPS = 120
#: Groups of failures, tags, and tasks in the tables.
MOST_FAILURE_GROUPS, MOST_TAGS, MOST_NEXT = 15, 20, 12
#: The steps that a chart may have.
_STEPS_MIN = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)


class DueStep(NamedTuple):
    start: datetime
    due: int
    #: How late the tasks of the step will start; None if some will not start at all.
    late_s: float | None


@dataclass(frozen=True)
class ReportData:
    made_at: datetime
    since: datetime
    step: timedelta
    series: Sequence[SeriesPoint]
    totals: dict[str, RunTotals]
    failures: Sequence[FailureGroup]
    gauges: Sequence[GaugePoint]
    on_time: Sequence[OnTime]
    state: DeploymentState
    #: The tasks that the processes of each worker run, by the worker's name.
    running_of: Mapping[str, int]
    #: The tasks of the next day by their due hour, and the number of workers that they need.
    due: Sequence[DueStep]
    needed_workers: int | None
    #: The assumptions of the forecast.
    notes: Sequence[str]
    next_tasks: Sequence[DelayTask]


def gather(delays: DelayTasks, since: timedelta) -> ReportData:
    """Read all parts. The statistics of the last minutes may be incomplete."""
    step = step_of(since)
    state = read_deployment(delays)
    statistics, begin = delays.statistics, state.now - since
    series = statistics.series(since=begin, step=step)
    forecast = delays.forecast(days=1, step=3600)
    return ReportData(
        made_at=state.now,
        since=begin,
        step=step,
        series=series,
        totals=statistics.totals(since=begin),
        failures=statistics.failures(since=begin, limit=MOST_FAILURE_GROUPS),
        gauges=statistics.gauges(since=begin, step=step),
        on_time=statistics.on_time(since=begin),
        state=state,
        running_of=snapshot(wiring_of(delays).shards, delays.settings).running_of,
        due=[DueStep(each.start, each.due, each.late_s) for each in forecast.steps],
        needed_workers=forecast.needed_workers,
        notes=forecast.notes,
        next_tasks=delays.find(
            status=Status.NOT_COMPLETE, since=state.now, limit=MOST_NEXT, newest_first=False
        ).tasks,
    )


def step_of(since: timedelta) -> timedelta:
    """Return the shortest step with which a chart of this time has at most `MOST_STEPS` steps."""
    steps = (timedelta(minutes=minutes) for minutes in _STEPS_MIN)
    return next((step for step in steps if since / step <= MOST_STEPS), timedelta(days=7))
