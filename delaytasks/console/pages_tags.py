"""The pages of tags, with charts of their runs, of policies and of recurring schedules.

Also the names of tags and queues that fields suggest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, NamedTuple

from flask import request
from markupsafe import Markup

from delaytasks.console.charts import Series, lines, sparkline, stacked_bars, with_legend
from delaytasks.console.forms import stored_schedule, typed_text, values_of_schedule
from delaytasks.console.requests import now, runtime, state
from delaytasks.console.shown import viewer_zone
from delaytasks.model.errors import DelayTaskError, StoreError
from delaytasks.model.inputs import ALL_QUEUES, check_tag, parse_duration
from delaytasks.operate.operations import NO_LIMIT
from delaytasks.operate.statistics import OTHER_TAGS, RunTotals, SeriesPoint, count_rows
from delaytasks.recurring.definition import RecurringSchedule

# -- the runs of a period, which all viewers share for some time ----------------------------------


class ChartPeriod(NamedTuple):
    since: str
    step: str
    #: Seconds for which all viewers see the same chart.
    kept_s: float


PERIODS = {
    "hour": ChartPeriod("1h", "1m", 10.0),
    "day": ChartPeriod("1d", "15m", 60.0),
    "two days": ChartPeriod("2d", "30m", 300.0),
}
#: The most rows that a long chart reads: one for each minute and tag.
MOST_CHART_ROWS = 100_000
UNREADABLE = "The statistics cannot be read: {}"
_OUTCOMES = ("done", "failed", "retried", "cancelled")


class Runs(NamedTuple):
    """The runs of a period by step."""

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


def read_runs(name: str, tag: str | None = None) -> Runs:
    """Return the runs of all tags in a period, or of one tag."""
    period = PERIODS[name]

    def read() -> Runs:
        busiest = None if tag is not None or name == "hour" else _busiest_tags(period)
        tags = busiest if tag is None else [tag]
        points = state().delays.statistics.series(since=period.since, step=period.step, tags=tags)
        return Runs(points, None if busiest is None else len(busiest))

    return state().history.get(("runs", name, tag), period.kept_s, read)


def _busiest_tags(period: ChartPeriod) -> list[str] | None:
    """Return the tags with the most runs in the last hour; None if all tags can be read."""
    end, length = now(), parse_duration(period.since)
    if count_rows(runtime().store, end - length, end, MOST_CHART_ROWS + 1) <= MOST_CHART_ROWS:
        return None
    most = max(MOST_CHART_ROWS // int(length.total_seconds() / 60), 1)
    return [each.tag for each in read_tags("hour")[0][:most]]


def chosen_period() -> str:
    """Return the period in the address of this request."""
    name = request.args.get("period", "hour")
    return name if name in PERIODS else "hour"


def shown_runs(tag: str | None = None) -> dict[str, Any]:
    """Return what a page shows of the chosen period.

    A database that does not answer is a part of the result.
    """
    name, found, problem = chosen_period(), Runs([]), None
    try:
        found = read_runs(name, tag)
    except StoreError as error:
        problem = UNREADABLE.format(error)
    total = RunTotals.total(point.total for point in found.points)
    counts = {outcome: getattr(total, outcome) for outcome in _OUTCOMES}
    return {
        "period": name,
        "periods": list(PERIODS),
        "step": PERIODS[name].step,
        "points": found.points,
        "total": total,
        "outcomes": ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items() if count),
        "cut_to": found.cut_to,
        "problem": problem,
        "throughput": _throughput,
        "quantiles": _quantiles,
    }


def _throughput(points: Sequence[SeriesPoint], step: str) -> Markup:
    """Return a chart of the runs of each step by outcome."""
    totals = [point.total for point in points]
    parts = [
        Series("done", "done", [one.done for one in totals]),
        Series("retried", "retried", [one.retried for one in totals]),
        Series("failed", "failed", [one.failed for one in totals]),
        Series("cancelled or expired", "other", [one.cancelled + one.expired for one in totals]),
    ]
    starts = [point.start.astimezone(viewer_zone()) for point in points]
    return with_legend(parts, stacked_bars(starts, parse_duration(step), parts))


def _quantiles(
    points: Sequence[SeriesPoint], step: str, of: Literal["lateness", "duration"], verb: str
) -> Markup:
    """Return a chart of the lateness or the durations of the runs of each step."""
    parts = [
        Series(
            f"p{percent}: {some} {verb}",
            f"p{percent}",
            [getattr(point.total, f"{of}_quantile")(percent / 100) for point in points],
        )
        for percent, some in ((50, "half"), (99, "99 of 100"))
    ]
    starts = [point.start.astimezone(viewer_zone()) for point in points]
    return with_legend(parts, lines(starts, parse_duration(step), parts))


# -- the list of tags, and one tag ----------------------------------------------------------------


#: Seconds for which all viewers see the same list, besides those of the runs that it is made of.
LIST_KEPT_S = 10.0
#: The most bars of a sparkline, each with one or more steps, and the most rows of the page.
MOST_BARS, SHOWN_TAGS = 32, 100


class TagRuns(NamedTuple):
    """The runs of one tag."""

    tag: str
    total: RunTotals
    spark: Markup


def read_tags(period: str) -> tuple[list[TagRuns], int | None]:
    """Return the tags of a period, those with the most runs first, and `Runs.cut_to`."""

    def read() -> tuple[list[TagRuns], int | None]:
        runs = read_runs(period)
        found = [_of_tag(tag, steps, len(runs.points)) for tag, steps in runs.by_tag().items()]
        return sorted(found, key=lambda each: (-each.total.started, each.tag)), runs.cut_to

    return state().history.get(("tags", period), LIST_KEPT_S, read)


def _of_tag(tag: str, steps: dict[int, RunTotals], count: int) -> TagRuns:
    of_bar = -(-count // MOST_BARS)
    bars = [0] * -(-count // of_bar)
    for number, total in steps.items():
        bars[number // of_bar] += total.started
    label = f"runs by time, at most {max(bars):,} in one of {len(bars)} bars"
    return TagRuns(tag, RunTotals.total(steps.values()), sparkline(bars, label))


def tags() -> dict[str, Any]:
    period, part = chosen_period(), request.args.get("contains", "").strip()
    found, cut_to, problem = list[TagRuns](), None, None
    try:
        found, cut_to = read_tags(period)
    except StoreError as error:
        problem = UNREADABLE.format(error)
    matching = [each for each in found if part.lower() in each.tag.lower()]
    return {
        "period": period,
        "periods": list(PERIODS),
        "rows": matching[:SHOWN_TAGS],
        "more": len(matching) - SHOWN_TAGS,
        "cut_to": cut_to,
        "contains": part,
        "problem": problem,
        "other_tags": OTHER_TAGS,
    }


# The name is no part of the path, since a tag may contain slashes, or be "..".
def tag() -> dict[str, Any]:
    name, found = check_tag(request.args.get("name", "")), state().snapshot()
    policies = (each for each in found.policies if (each.kind, each.name) == ("tag", name))
    return {
        "s": found,
        "now": found.now,
        "tag": name,
        "runs": shown_runs(name),
        "policy": next(policies, None),
        "groups": [group for group in found.groups if group.tag == name],
        "is_other": name == OTHER_TAGS,
    }


# -- policies, and recurring schedules ------------------------------------------------------------


def policies() -> dict[str, Any]:
    found, tag = state().snapshot(), request.args.get("tag", "").strip()
    stored = state().delays.policies.list(tag=tag) if tag else []
    limits = ("concurrency", "concurrency_per_key")
    values = {
        "tag": tag,
        **{name: getattr(policy, name) for policy in stored for name in limits},
        "rate": next((policy.rate_text for policy in stored), None),
    }
    return {
        "rows": found.policies,
        "now": found.now,
        "edited": tag if any(policy.has_limits for policy in stored) else None,
        "values": {name: NO_LIMIT if value is None else value for name, value in values.items()},
    }


#: The schedules of a page, and the occurrences that are shown of each.
SCHEDULES_PER_PAGE, NEXT = 100, 3


def recurring() -> dict[str, Any]:
    after = request.args.get("after") or None
    found = state().delays.recurring.list(after=after, limit=SCHEDULES_PER_PAGE)
    edited, values = stored_schedule(request.args.get("name", "").strip()), dict[str, str]()
    if edited is not None:
        values = {name: typed_text(each) for name, each in values_of_schedule(edited).items()}
        with suppress(ValueError, RecursionError):  # this process may have no key to decrypt it
            values["body"] = json.dumps(edited.body, ensure_ascii=False, indent=2)
    return {
        "rows": [(each, _next(each)) for each in found],
        "following": found[-1].name if len(found) == SCHEDULES_PER_PAGE else None,
        "edited": edited,
        "values": values,
    }


def _next(schedule: RecurringSchedule) -> list[datetime]:
    try:
        return schedule.next(NEXT, now())
    except DelayTaskError:  # another program has written the timing
        return []


# -- the names that fields suggest ----------------------------------------------------------------


#: The most names of each kind, and the seconds for which all viewers see the same ones.
MOST_SUGGESTED, KNOWN_S = 200, 60.0


def known_names() -> dict[str, list[str]]:
    """Return the tags and the queues of workers, policies and statistics, sorted.

    No task is read. Of more than `MOST_SUGGESTED` tags, those of policies and workers come first,
    and then those with the most runs of the last hour.
    """
    return state().history.get("known_names", KNOWN_S, _read_names)


def _read_names() -> dict[str, list[str]]:
    store, settings = runtime().store, runtime().settings
    known = {"tag": list[str](), "queue": [settings.default_queue]}
    with suppress(StoreError):  # a database that does not answer has no names
        for policy in store.policies.read():
            known[policy.kind].append(policy.name)
        for worker in store.workers.registered(now(), settings.silent_s):
            known["tag"] += worker.tags or ()
            known["queue"] += worker.queues
    with suppress(StoreError):
        known["tag"] += (each.tag for each in read_tags("hour")[0])
    for kind, names in known.items():
        different = [name for name in dict.fromkeys(names) if name not in (OTHER_TAGS, ALL_QUEUES)]
        known[kind] = sorted(different[:MOST_SUGGESTED])
    return known
