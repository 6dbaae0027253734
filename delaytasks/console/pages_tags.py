"""The pages of tags, with charts of their runs, and the names that fields suggest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from itertools import islice
from typing import NamedTuple

from flask import Flask, render_template, request
from markupsafe import Markup

from delaytasks.client import DelayTasks
from delaytasks.console.charts import (
    Series,
    duration_chart,
    lateness_chart,
    sparkline,
    stacked_bars,
    throughput_chart,
)
from delaytasks.console.queries import BAR, DueSoon
from delaytasks.console.requests import requires, state
from delaytasks.console.shown import viewer_zone
from delaytasks.console.viewers import Role
from delaytasks.model.errors import StoreError
from delaytasks.model.inputs import ALL_QUEUES, check_tag, parse_duration, show_measured
from delaytasks.runtime import runtime_of
from delaytasks.statistics.reading import OTHER_TAGS, RunTotals, SeriesPoint, count_rows


class ChartPeriod(NamedTuple):
    since: str
    step: str
    #: Seconds for which all viewers see the same chart.
    kept_s: float
    #: Whether the number of rows is checked before they are read.
    has_row_limit: bool = False


PERIODS = {
    "hour": ChartPeriod("1h", "1m", 10.0),
    "day": ChartPeriod("1d", "15m", 60.0, has_row_limit=True),
    "two days": ChartPeriod("2d", "30m", 300.0, has_row_limit=True),
}
#: The most rows that a long chart reads: one for each minute and tag.
MOST_CHART_ROWS = 100_000
_SHOWN_OUTCOMES = ("done", "failed", "retried", "cancelled")


class PeriodRuns(NamedTuple):
    """The runs of all tags by step."""

    points: Sequence[SeriesPoint]
    #: The number of tags that were read, if all of them have more than `MOST_CHART_ROWS` rows.
    cut_to: int | None = None

    def by_tag(self) -> dict[str, dict[int, RunTotals]]:
        """Return the totals of each tag by the number of the step."""
        steps: dict[str, dict[int, RunTotals]] = {}
        for number, point in enumerate(self.points):
            for tag, total in point.tags.items():
                steps.setdefault(tag, {})[number] = total
        return steps


@dataclass
class Runs:
    """The runs of one period, of all tags or of one."""

    step: str
    has_runs: bool = False
    total: RunTotals = field(default_factory=lambda: RunTotals.total([]))
    p50: str = "–"
    p99: str = "–"
    longest: str = "–"
    summary: str = ""
    lateness: Markup | str = ""
    throughput: Markup | str = ""
    #: Only of one tag.
    duration: Markup | str = ""
    problem: str | None = None
    cut_to: int | None = None


def due_chart(due: DueSoon, now: datetime, zone: tzinfo) -> Markup:
    """Return the bars of the tasks that are due in each of the next minutes."""
    starts = [now.astimezone(zone) + n * BAR for n in range(len(due.counts))]
    return Markup(stacked_bars(starts, BAR, [Series("due", "due", due.counts)]))


def chosen_period() -> str:
    """Return the period in the address of this request."""
    period = request.args.get("period", "hour")
    return period if period in PERIODS else "hour"


def runs_of(name: str, zone: tzinfo, tag: str | None = None) -> Runs:
    """Return the runs of a period; a database that does not answer is part of the result."""
    try:
        found = read_runs(name) if tag is None else PeriodRuns(_read_tag(name, tag))
    except StoreError as error:
        return Runs(PERIODS[name].step, problem=f"The statistics cannot be read: {error}")
    runs = _runs(PERIODS[name], found, zone)
    if tag is not None:
        step = parse_duration(runs.step)
        runs.duration = Markup(duration_chart(found.points, step, zone))
    return runs


def read_runs(name: str) -> PeriodRuns:
    """Return the runs of all tags in a period, which all viewers share for some time."""
    return state().history.get(("runs", name), PERIODS[name].kept_s, lambda: _read_all(name))


def _read_all(name: str) -> PeriodRuns:
    period, delays = PERIODS[name], state().delays
    tags = _busiest_tags(period) if period.has_row_limit else None
    points = delays.statistics.series(since=period.since, step=period.step, tags=tags)
    return PeriodRuns(points, None if tags is None else len(tags))


def _busiest_tags(period: ChartPeriod) -> list[str] | None:
    """Return the tags with the most runs in the last hour; None if all tags can be read."""
    runtime = runtime_of(state().delays)
    now, length = runtime.clock.now(), parse_duration(period.since)
    if count_rows(runtime.store, now - length, now, MOST_CHART_ROWS + 1) <= MOST_CHART_ROWS:
        return None
    started = {
        tag: sum(total.started for total in steps.values())
        for tag, steps in read_runs("hour").by_tag().items()
    }
    most = max(MOST_CHART_ROWS // int(length.total_seconds() / 60), 1)
    return sorted(started, key=lambda tag: (-started[tag], tag))[:most]


def _read_tag(name: str, tag: str) -> Sequence[SeriesPoint]:
    period, shared = PERIODS[name], state()

    def read() -> Sequence[SeriesPoint]:
        return shared.delays.statistics.series(since=period.since, step=period.step, tags=[tag])

    return shared.history.get(("runs", name, tag), period.kept_s, read)


def _runs(period: ChartPeriod, found: PeriodRuns, zone: tzinfo) -> Runs:
    points, step = found.points, parse_duration(period.step)
    total = RunTotals.total(point.total for point in points)
    counts = {outcome: getattr(total, outcome) for outcome in _SHOWN_OUTCOMES}
    words = [f"{count:,} {outcome}" for outcome, count in counts.items() if count]
    return Runs(
        period.step,
        has_runs=any(counts.values()),
        total=total,
        p50=show_measured(total.lateness_quantile(0.5)),
        p99=show_measured(total.lateness_quantile(0.99)),
        longest=show_measured(total.lateness_max_s if total.started else None),
        summary=", ".join(words) or "no runs",
        lateness=Markup(lateness_chart(points, step, zone)),
        throughput=Markup(throughput_chart(points, step, zone)),
        cut_to=found.cut_to,
    )


#: Seconds for which all viewers see the same list, besides those of the runs that it is made of.
LIST_KEPT_S = 10.0
#: The most bars of a sparkline. Each has one or more steps of the period.
MOST_BARS = 32


class TagRuns(NamedTuple):
    """The runs of one tag."""

    tag: str
    total: RunTotals
    spark: Markup

    @property
    def failed(self) -> int:
        """The runs that failed, those that will be retried included."""
        return self.total.failed + self.total.retried


class TagList(NamedTuple):
    """The tags that have counts in a period, those with the most runs first."""

    tags: tuple[TagRuns, ...]
    #: The number of tags that were read, if all of them have too many rows.
    cut_to: int | None


def read_tags(period: str) -> TagList:
    """Return the tags of a period, from the same rows as the charts of the overview."""
    return state().history.get(("tags", period), LIST_KEPT_S, lambda: _tags_of(read_runs(period)))


def _tags_of(found: PeriodRuns) -> TagList:
    tags = [_runs_of(tag, steps, len(found.points)) for tag, steps in found.by_tag().items()]
    tags.sort(key=lambda each: (-each.total.started, each.tag))
    return TagList(tuple(tags), found.cut_to)


def _runs_of(tag: str, steps: dict[int, RunTotals], count: int) -> TagRuns:
    of_bar = -(-count // MOST_BARS)
    bars = [0] * -(-count // of_bar)
    for number, total in steps.items():
        bars[number // of_bar] += total.started
    label = f"runs by time, at most {max(bars):,} in one of {len(bars)} bars"
    return TagRuns(tag, RunTotals.total(steps.values()), Markup(sparkline(bars, label)))


#: The most names of each kind, and the seconds for which all viewers see the same ones.
MOST_SUGGESTED, KNOWN_S = 200, 60.0


class KnownNames(NamedTuple):
    """Names in the order of the alphabet."""

    tags: list[str]
    queues: list[str]


def known_names() -> KnownNames:
    """Return the tags and queues of workers, policies and statistics.

    No task is read. Of more than `MOST_SUGGESTED` tags, those of policies and workers come first,
    and then those with the most runs of the last hour.
    """
    shared = state()
    return shared.history.get("known_names", KNOWN_S, lambda: _read(shared.delays))


def _read(delays: DelayTasks) -> KnownNames:
    """Read the names; none if the database does not answer."""
    tags, queues = dict[str, None](), {delays.settings.default_queue: None}
    now = runtime_of(delays).clock.now()
    store = runtime_of(delays).store
    with suppress(StoreError):
        for policy in store.policies.read():
            (tags if policy.kind == "tag" else queues)[policy.name] = None
        for worker in store.workers.registered(now, delays.settings.silent_s):
            tags.update(dict.fromkeys(worker.tags or ()))
            queues.update(dict.fromkeys(worker.queues))
    with suppress(StoreError):
        tags.update(dict.fromkeys(each.tag for each in read_tags("hour").tags))
    tags.pop(OTHER_TAGS, None)
    queues.pop(ALL_QUEUES, None)
    return KnownNames(_first(tags), _first(queues))


def _first(names: Iterable[str]) -> list[str]:
    return sorted(islice(names, MOST_SUGGESTED))


#: The most rows of the page of tags.
SHOWN_TAGS = 100


def install(app: Flask) -> None:
    app.add_url_rule("/tags", view_func=tags)
    # The name is no part of the path, since a tag may contain slashes, or be "..".
    app.add_url_rule("/tag", view_func=tag)


@requires(Role.VIEW)
def tags() -> str:
    period, part = chosen_period(), request.args.get("contains", "").strip()
    found, problem = TagList((), None), None
    try:
        found = read_tags(period)
    except StoreError as error:
        problem = f"The statistics cannot be read: {error}"
    matching = [each for each in found.tags if part.lower() in each.tag.lower()]
    return render_template(
        "tags.html",
        page="tags",
        period=period,
        periods=list(PERIODS),
        step=PERIODS[period].step,
        tags=matching[:SHOWN_TAGS],
        more=len(matching) - SHOWN_TAGS,
        cut_to=found.cut_to,
        contains=part,
        problem=problem,
        other_tags=OTHER_TAGS,
    )


@requires(Role.VIEW)
def tag() -> str:
    name, period = check_tag(request.args.get("name", "")), chosen_period()
    found = state().snapshot()
    policies = [each for each in found.policies if (each.kind, each.name) == ("tag", name)]
    return render_template(
        "tag.html",
        page="tags",
        s=found,
        now=found.now,
        tag=name,
        period=period,
        periods=list(PERIODS),
        runs=runs_of(period, viewer_zone(), name),
        policy=next(iter(policies), None),
        groups=[group for group in found.groups if group.tag == name],
        is_other=name == OTHER_TAGS,
    )
