"""The pages: functions that read what their templates show.

First the overview, queues, workers and failures, then the tags with charts of their runs, policies
and recurring schedules, then the tasks and the audit table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from flask import abort, redirect, render_template, request, url_for
from markupsafe import Markup
from sqlalchemy import select
from werkzeug.wrappers import Response

from delaytasks.console.forms import OFFERS, TaskQuery, chosen_tasks, possible_operations
from delaytasks.console.requests import SNAPSHOT_S, Role, now, route, runtime, state, viewer
from delaytasks.console.shown import Series, lines, sparkline, stacked_bars, viewer_zone
from delaytasks.db.store import Store
from delaytasks.db.task_rows import conditions, first_page
from delaytasks.model.clock import MAX_ID
from delaytasks.model.errors import DelayTaskError, InvalidInputError, StoreError
from delaytasks.model.filters import Filter, Filters, filter_of
from delaytasks.model.inputs import check_id, check_tag, parse_duration
from delaytasks.model.moves import Status, moves_from
from delaytasks.model.task import Page
from delaytasks.operate.health import verdict_of
from delaytasks.operate.state import DeploymentState, live_groups
from delaytasks.operate.statistics import OTHER_TAGS, RunTotals, SeriesPoint
from delaytasks.operate.task_calls import SearchTimeoutError, find_tasks, limited_search
from delaytasks.operate.why import why
from delaytasks.recurring.definition import RecurringSchedule

# -- the overview ---------------------------------------------------------------------------------


#: Seconds for which all viewers see the same counts of queues.
QUEUES_S = 5.0


@route("/", "overview.html")
def overview() -> dict[str, Any]:
    found = state().snapshot()
    # The block has nothing else of the request. It is dropped with its snapshot.
    key = "overview", found.now, chosen_period(), str(viewer_zone()), request.script_root
    headline, shown = state().cache.get(key, SNAPSHOT_S, lambda: _overview(found))
    return {"headline": headline, "shown": shown}


def _overview(found: DeploymentState) -> tuple[str, Markup]:
    """Return the headline of the overview, and the block that its viewers share.

    Open overviews are read again every few seconds, and workers may need the processor.
    """
    cache, zone = state().cache, viewer_zone()
    due = cache.get(("due", found.now), SNAPSHOT_S, lambda: count_due(runtime().store, found.now))
    starts = [found.now.astimezone(zone) + n * BAR for n in range(BARS)]
    verdict = verdict_of(found, zone)
    shown = render_template(
        "overview_live.html",
        s=found,
        now=found.now,
        settings=state().delays.settings,
        database_url=runtime().store.database.shown_url,
        verdict=verdict,
        due=due,
        is_due_cut=sum(due) >= MOST_DUE,
        due_chart=stacked_bars(starts, BAR, [Series("due", "due", due)]),
        runs=shown_runs(),
    )
    return verdict.headline, Markup(shown)


#: The bars of the histogram of due times, the time of each, and the limits of the read.
BARS, BAR, MOST_DUE, MOST_QUEUES = 30, timedelta(minutes=1), 5_000, 100


def count_due(store: Store, now: datetime) -> list[int]:
    """Count the waiting tasks that are due in each of the next minutes.

    At most `MOST_DUE` of `MOST_QUEUES` queues are read.
    """
    table, counts = store.schema.tasks, [0] * BARS
    t, waiting = table.c, Filter(status=frozenset({Status.NOT_COMPLETE}))
    soon = t.expected_time >= now, t.expected_time < now + BARS * BAR
    query = select(t.expected_time, t.id).where(*soon)
    for at, _ in store.database.autocommitted(
        lambda c: first_page(c, query, table, waiting, MOST_DUE, most_queues=MOST_QUEUES)
    ):
        counts[min((at - now) // BAR, BARS - 1)] += 1
    return counts


# -- queues and workers ---------------------------------------------------------------------------


@route("/queues", "lists.html")
def queues() -> dict[str, Any]:
    found = state().snapshot()
    live = state().cache.get("queues", QUEUES_S, lambda: live_groups(found))
    return {"rows": live["queue"], "s": found}


@route("/workers", "lists.html")
def workers() -> dict[str, Any]:
    return {"s": state().snapshot()}


# -- failures ------------------------------------------------------------------------------------


@route("/failures", "lists.html")
def failures() -> dict[str, Any]:
    found = state().snapshot()
    return {"rows": found.groups, "s": found}


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
UNREADABLE = "The statistics cannot be read: {}"
_OUTCOMES = ("done", "failed", "retried", "cancelled")


def read_runs(name: str, tag: str | None = None) -> Sequence[SeriesPoint]:
    """Return the runs of all tags in a period by step, or of one tag."""
    period, tags = PERIODS[name], None if tag is None else [tag]
    read = partial(
        state().delays.statistics.series, since=period.since, step=period.step, tags=tags
    )
    return state().history.get(("runs", name, tag), period.kept_s, read)


def chosen_period() -> str:
    """Return the period in the address of this request."""
    name = request.args.get("period", "hour")
    return name if name in PERIODS else "hour"


def shown_runs(tag: str | None = None) -> dict[str, Any]:
    """Return what a page shows of the chosen period.

    A database that does not answer is a part of the result.
    """
    name, points, problem = chosen_period(), list[SeriesPoint](), None
    try:
        points = [*read_runs(name, tag)]
    except StoreError as error:
        problem = UNREADABLE.format(error)
    total = RunTotals.total(point.total for point in points)
    counts = {outcome: getattr(total, outcome) for outcome in _OUTCOMES}
    return {
        "period": name,
        "periods": list(PERIODS),
        "step": PERIODS[name].step,
        "points": points,
        "total": total,
        "outcomes": ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items() if count),
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
    return stacked_bars(starts, parse_duration(step), parts)


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
    return lines(starts, parse_duration(step), parts)


# -- the list of tags, and one tag ----------------------------------------------------------------


#: Seconds for which all viewers see the same list. The runs in it are kept for a time of their own.
LIST_KEPT_S = 10.0
#: The most bars of a sparkline, each with one or more steps, and the most rows of the page.
MOST_BARS, SHOWN_TAGS = 32, 100


class TagRuns(NamedTuple):
    """The runs of one tag."""

    tag: str
    total: RunTotals
    spark: Markup


def read_tags(period: str) -> list[TagRuns]:
    """Return the tags of a period, those with the most runs first."""

    def read() -> list[TagRuns]:
        points, by_tag = read_runs(period), defaultdict[str, dict[int, RunTotals]](dict)
        for number, point in enumerate(points):
            for tag, total in point.tags.items():
                by_tag[tag][number] = total
        found = [_of_tag(tag, steps, len(points)) for tag, steps in by_tag.items()]
        return sorted(found, key=lambda each: (-each.total.started, each.tag))

    return state().history.get(("tags", period), LIST_KEPT_S, read)


def _of_tag(tag: str, steps: dict[int, RunTotals], count: int) -> TagRuns:
    of_bar = -(-count // MOST_BARS)
    bars = [0] * -(-count // of_bar)
    for number, total in steps.items():
        bars[number // of_bar] += total.started
    label = f"runs by time, at most {max(bars):,} in one of {len(bars)} bars"
    return TagRuns(tag, RunTotals.total(steps.values()), sparkline(bars, label))


@route("/tags", "lists.html")
def tags() -> dict[str, Any]:
    period, part = chosen_period(), request.args.get("contains", "").strip()
    found, problem = list[TagRuns](), None
    try:
        found = read_tags(period)
    except StoreError as error:
        problem = UNREADABLE.format(error)
    matching = [each for each in found if part.lower() in each.tag.lower()]
    return {
        "period": period,
        "periods": list(PERIODS),
        "rows": matching[:SHOWN_TAGS],
        "more": len(matching) - SHOWN_TAGS,
        "contains": part,
        "problem": problem,
        "other_tags": OTHER_TAGS,
    }


# The name is no part of the path, since a tag may contain slashes, or be "..".
@route("/tag", "tag.html")
def tag() -> dict[str, Any]:
    name, found = check_tag(request.args.get("name", "")), state().snapshot()
    policies = (each for each in found.policies if (each.kind, each.name) == ("tag", name))
    return {
        "s": found,
        "tag": name,
        "runs": shown_runs(name),
        "policy": next(policies, None),
        "groups": [group for group in found.groups if group.tag == name],
        "is_other": name == OTHER_TAGS,
    }


# -- policies, and recurring schedules ------------------------------------------------------------


@route("/policies", "lists.html")
def policies() -> dict[str, Any]:
    return {"rows": state().snapshot().policies, "values": request.args}


#: The schedules of a page, and the occurrences that are shown of each.
SCHEDULES_PER_PAGE, NEXT = 100, 3


@route("/recurring", "lists.html")
def recurring() -> dict[str, Any]:
    after = request.args.get("after") or None
    found = state().delays.recurring.list(after=after, limit=SCHEDULES_PER_PAGE)
    return {
        "rows": [(each, _next(each)) for each in found],
        "following": found[-1].name if len(found) == SCHEDULES_PER_PAGE else None,
    }


def _next(schedule: RecurringSchedule) -> list[datetime]:
    try:
        return schedule.next(NEXT, now())
    except DelayTaskError:  # another program has written the timing
        return []


# -- the list, and one task -----------------------------------------------------------------------


#: Seconds after which a search ends.
SEARCH_S = 5.0
TASKS_PER_PAGE = 50


def search(
    filters: Mapping[str, Any], limit: int, cursor: str | None = None, is_newest_first: bool = True
) -> Page:
    """Return a page like `DelayTasks.find`, or raise `SearchTimeoutError`."""
    where = cast("Filters", filters)
    return find_tasks(runtime(), where, cursor, limit, is_newest_first, None, SEARCH_S)


@route("/tasks", "tasks.html")
def tasks() -> dict[str, Any] | Response:
    if id := request.args.get("id", "").strip():
        return redirect(url_for("task", id=check_id(id)), 303)
    problem, found, query = None, Page([], None), TaskQuery({}, {})
    cursor, is_newest_first = request.args.get("cursor"), request.args.get("order") != "oldest"
    try:
        query = TaskQuery.read(request.args)
        if "meta" in query.filters and viewer().role < Role.OPERATE:
            raise InvalidInputError(
                "your role does not show meta, so it cannot search by meta", "meta"
            )
        where = dict(query.filters)
        if "error" in where:  # it has no index, but FAILED tasks are few
            where.setdefault("status", Status.FAILED)
        found = search(where, TASKS_PER_PAGE, cursor or None, is_newest_first)
    except (InvalidInputError, SearchTimeoutError) as error:
        problem = str(error)
    return {
        "query": query,
        "order": {} if is_newest_first else {"order": "oldest"},
        "cursor": cursor,
        "found": found,
        "problem": problem,
        "statuses": [status.name for status in Status],
        "actions": possible_operations(query.filters.get("status", ())),
    }


@route("/tasks/<id>", "task.html")
def task(id: str) -> dict[str, Any]:
    delays = state().delays
    found = delays.get(check_id(id))
    reasons = why(runtime(), found)
    schedules = (reason.name for reason in reasons if reason.code == "recurring")
    return {
        "task": found,
        "attempts": delays.get(found, attempts=True).attempts,
        "schedule": next(schedules, None),
        # The console does not know how its viewers call the command line.
        "reasons": [(r.sentence, "" if ": delaytasks " in r.remedy else r.remedy) for r in reasons],
        "moves": set(moves_from(found.status)),
    }


# -- many tasks, and the audit table --------------------------------------------------------------


#: Tasks that are counted before a viewer confirms.
MOST_MATCHES_COUNTED = 5_000
#: Tasks that are shown as examples, and entries on a page of the audit table.
EXAMPLE_TASKS, AUDIT_ENTRIES = 10, 200


@route("/bulk", "bulk.html", Role.OPERATE)
def bulk() -> dict[str, Any]:
    """Count the tasks that an operation would change, before the viewer confirms it."""
    name = request.args.get("action", "")
    if name not in possible_operations():
        abort(404)
    filters, movable = chosen_tasks(name, request.args)
    where = {**filters, "status": movable}
    count = _count(filter_of(cast("Filters", where)))
    return {
        "action": name,
        "word": OFFERS[name].word,
        "count": min(count, MOST_MATCHES_COUNTED),
        "has_more": count > MOST_MATCHES_COUNTED,
        "examples": search(where, EXAMPLE_TASKS, is_newest_first=False).tasks,
        "kept": TaskQuery.read(request.args).typed,
        "selected": len(set(filters.get("ids", ()))),
        "values": request.args,
    }


def _count(where: Filter) -> int:
    """Return the number of tasks, or one more than are counted."""
    database, table = runtime().store.database, runtime().store.schema.tasks
    query = select(table.c.expected_time, table.c.id)
    query = query.where(*conditions(table, where, database.can))
    most = MOST_MATCHES_COUNTED + 1
    rows = limited_search(database, lambda on: first_page(on, query, table, where, most), SEARCH_S)
    return len(rows)


@route("/audit/<id>", "bulk.html")
def entry(id: str) -> dict[str, Any]:
    """The page of a log entry, which follows a bulk operation wherever it runs."""
    found = runtime().store.bulk.audit.get(check_id(id)) or abort(404)
    word = OFFERS[found.action].word if found.action in OFFERS else found.action
    is_ours = found.id in state().stops  # until its end is seen in all numbers
    return {"entry": found, "word": word, "is_ours": is_ours}


@route("/audit", "lists.html")
def audit() -> dict[str, Any]:
    log, before = state().delays.bulk.log, request.args.get("before", type=int)
    before = None if before is None else min(max(before, 1), MAX_ID)
    entries = state().cache.get(
        ("audit", before), 2.0, lambda: log(limit=AUDIT_ENTRIES + 1, before=before)
    )
    shown = entries[:AUDIT_ENTRIES]
    return {"rows": shown, "following": shown[-1].id if len(entries) > AUDIT_ENTRIES else None}
