"""The sections of a report that have charts."""

from __future__ import annotations

from delaytasks.cli.reporting.data import ReportData
from delaytasks.cli.reporting.html import section, text_of
from delaytasks.core.clock import AN_HOUR
from delaytasks.core.durations import show_duration
from delaytasks.statistics.charts import (
    Series,
    lateness_chart,
    legend,
    stacked_bars,
    throughput_chart,
)


def throughput_section(data: ReportData) -> str:
    chart = throughput_chart(data.series, data.step)
    return section(f"Runs in each {_step(data)}, by outcome", chart)


def lateness_section(data: ReportData) -> str:
    chart = lateness_chart(data.series, data.step)
    return section("Lateness: from the due time to the start", chart)


def backlog_section(data: ReportData) -> str:
    if not data.gauges:
        return section("Overdue, held and running tasks", "<p>No sweep has counted yet.</p>")
    by_start = {point.start: point.gauges for point in data.gauges}
    starts = [point.start for point in data.series]
    found = [by_start.get(start) for start in starts]
    parts = [
        Series("overdue", "late", [None if g is None else g.overdue for g in found]),
        Series("held", "other", [None if g is None else g.held for g in found]),
        Series("running", "due", [None if g is None else g.running for g in found]),
    ]
    body = legend(parts) + stacked_bars(starts, data.step, parts)
    return section("Overdue, held and running tasks", body)


def due_section(data: ReportData) -> str:
    if not data.due:
        return section("Due in the next day", "<p>No task is due in the next day.</p>")
    by_start = {step.start: step for step in data.due}
    first = data.due[0].start
    starts = [first + n * AN_HOUR for n in range((data.due[-1].start - first) // AN_HOUR + 1)]
    steps = [by_start.get(start) for start in starts]
    is_late = [step is not None and (step.late_s is None or step.late_s > 60) for step in steps]
    due = [0 if step is None else step.due for step in steps]
    late = [n if is_so else 0 for n, is_so in zip(due, is_late, strict=True)]
    on_time = [n - m for n, m in zip(due, late, strict=True)]
    parts = [Series("on time", "due", on_time), Series("will be late", "late", late)]
    chart = stacked_bars(starts, AN_HOUR, parts)
    notes = "".join(f"<small>{text_of(note, 500)} </small>" for note in data.notes)
    return section("Due in the next day, by hour (forecast)", legend(parts) + chart + notes)


def _step(data: ReportData) -> str:
    shown = show_duration(data.step.total_seconds())
    return {"1m": "minute", "1h": "hour", "1d": "day"}.get(shown, shown)
