"""The sections of a report that have tables."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from delaytasks.cli.reporting.data import MOST_TAGS, ReportData
from delaytasks.cli.reporting.html import section, table, text_of
from delaytasks.cli.times import show_from_now
from delaytasks.core.clock import AN_HOUR
from delaytasks.core.durations import show_duration, show_measured
from delaytasks.statistics.charts import sparkline

LONGEST_PATTERN = 300
#: Hours of a small chart.
MOST_HOURS = 24 * 14


def failures_section(data: ReportData) -> str:
    if not data.failures:
        return section("Failures", "<p>No run has failed.</p>")
    rows = []
    for group in sorted(data.failures, key=lambda group: -group.runs):
        hours = _by_hour(group.hours)
        rows.append(
            [
                f"<b>{text_of(group.tag)}</b>",
                f"<code>{text_of(group.pattern, LONGEST_PATTERN)}</code>",
                f"{group.runs:,}",
                show_from_now(group.last_at, data.made_at),
                sparkline(hours, f"failed runs in each of {len(hours)} hours"),
                f"<code>{group.task_id}</code>",
            ]
        )
    heads = ["tag", "error (* differs)", "failed runs", "last", "by hour", "one of the tasks"]
    return section("Failures, grouped by error", table(heads, rows, numbers={2, 3}, texts={1}))


def _by_hour(hours: Mapping[datetime, int]) -> list[int]:
    """Return the counts from the first hour to the last one, hours without failures included."""
    if not hours:
        return []
    first = min(hours)
    steps = min((max(hours) - first) // AN_HOUR, MOST_HOURS)
    return [hours.get(first + n * AN_HOUR, 0) for n in range(steps + 1)]


def tags_section(data: ReportData) -> str:
    if not data.totals:
        return ""
    whole_s = sum(one.duration_s for one in data.totals.values()) or 1.0
    slowest = sorted(
        data.totals.items(), key=lambda each: -(each[1].duration_quantile(0.99) or 0.0)
    )
    rows = []
    for tag, one in slowest[:MOST_TAGS]:
        ended, share = one.done + one.failed, one.duration_s / whole_s
        rows.append(
            [
                f"<b>{text_of(tag)}</b>",
                f"{one.started:,}",
                f"{one.failed / ended:.1%}" if ended else "–",
                show_measured(one.duration_quantile(0.5)),
                show_measured(one.duration_quantile(0.99)),
                show_measured(one.lateness_quantile(0.5)),
                show_measured(one.lateness_quantile(0.99)),
                f'{share:.0%}<span class="share" style="width:{max(share * 100, 1):.0f}%"></span>',
            ]
        )
    heads = "tag|runs|failed|duration p50|duration p99|lateness p50|lateness p99|share of the time"
    body = table(heads.split("|"), rows, numbers=set(range(1, 8)))
    more = len(slowest) - MOST_TAGS
    return section(
        "Tags, the slowest first", body + (f"<p>and {more} more</p>" if more > 0 else "")
    )


def promises_section(data: ReportData) -> str:
    rows = [
        [
            f"<b>{text_of(each.tag)}</b>",
            "–" if each.promised_s is None else show_measured(each.promised_s),
            f"{each.share:.2%}",
            f"{each.late:,} of {each.on_time + each.late:,}",
            f"{each.budget_left:.0%}",
        ]
        for each in data.on_time
    ]
    if not rows:
        return ""
    heads = ["tag", "promise", "on time", "late", "error budget left"]
    return section("Promises kept", table(heads, rows, numbers={1, 2, 3, 4}))


def next_section(data: ReportData) -> str:
    rows = [
        [
            show_from_now(task.due, data.made_at),
            f"<b>{text_of(task.tag)}</b>",
            text_of(task.queue),
            f"<code>{task.id}</code>",
        ]
        for task in data.next_tasks
    ]
    if not rows:
        return section("Due next", "<p>No task waits.</p>")
    return section("Due next", table(["due", "tag", "queue", "task"], rows, numbers=set()))


def workers_section(data: ReportData) -> str:
    rows = [
        [
            f"<b>{text_of(worker.name)}</b>",
            f"{show_duration(worker.age_s)} ago",
            f"{data.running_of.get(worker.name, 0):,}",
            f"{worker.concurrency:,}",
            text_of(worker.pool),
            text_of(", ".join(worker.queues)),
        ]
        for worker in data.state.workers
    ]
    if not rows:
        return ""
    heads = ["worker", "seen", "runs now", "processes", "pool", "queues"]
    return section("Workers", table(heads, rows, numbers={1, 2, 3}))
