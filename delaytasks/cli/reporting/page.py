"""The HTML page of `delaytasks report`: one file that loads nothing."""

from __future__ import annotations

from html import escape

from delaytasks.cli.reporting.chart_sections import (
    backlog_section,
    due_section,
    lateness_section,
    throughput_section,
)
from delaytasks.cli.reporting.data import ReportData
from delaytasks.cli.reporting.findings import findings_of
from delaytasks.cli.reporting.html import text_of
from delaytasks.cli.reporting.style import STYLE
from delaytasks.cli.reporting.table_sections import (
    failures_section,
    next_section,
    promises_section,
    tags_section,
    workers_section,
)
from delaytasks.cli.times import show_instant
from delaytasks.core.durations import show_measured
from delaytasks.statistics.results import RunTotals

#: The page may run no script and load nothing, also if a tag or an error contained HTML.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(data: ReportData, title: str) -> str:
    """Return the whole page."""
    parts = [
        _verdict(data),
        _tiles(data),
        '<div class="pair">',
        throughput_section(data),
        lateness_section(data),
        "</div>",
        '<div class="pair">',
        backlog_section(data),
        due_section(data),
        "</div>",
        failures_section(data),
        tags_section(data),
        promises_section(data),
        next_section(data),
        workers_section(data),
    ]
    period = f"{show_instant(data.since)} to {show_instant(data.made_at)}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><main><header><h1>{escape(title)}</h1>
<p class="dim">{period}. All times are in UTC. Counts of the last two minutes may be incomplete.</p>
</header>
{"".join(parts)}
<small>Made by delaytasks report at {show_instant(data.made_at)}.</small>
</main></body></html>
"""


# -- the beginning --------------------------------------------------------------------------------


def _verdict(data: ReportData) -> str:
    findings = findings_of(data)
    items = "".join(
        f'<li class="{problem.level}">{text_of(problem.text, 1000)}</li>'
        for problem in findings.problems
    )
    fine = "Nothing is overdue, few runs failed, and tasks began on time."
    body = f"<ul>{items}</ul>" if items else f"<p>{fine}</p>"
    headline = text_of(findings.headline)
    return f'<section class="verdict {findings.level}"><strong>{headline}</strong>{body}</section>'


def _tiles(data: ReportData) -> str:
    runs, now = RunTotals.total(data.totals.values()), data.state
    tiles = [
        ("runs done", f"{runs.done:,}", False),
        ("runs failed", f"{runs.failed:,}", bool(runs.failed)),
        ("runs retried", f"{runs.retried:,}", False),
        ("lateness p50", show_measured(runs.lateness_quantile(0.5)), False),
        ("lateness p99", show_measured(runs.lateness_quantile(0.99)), False),
        ("running now", f"{now.running:,}", False),
        ("overdue now", f"{now.overdue:,}", bool(now.overdue)),
        ("held now", f"{now.held:,}", False),
        ("failed now", f"{now.failed:,}", bool(now.failed)),
        ("workers", f"{len(now.alive):,}", False),
    ]
    shown = (
        f'<div class="tile{" bad" if is_bad else ""}"><b>{value}</b><small>{name}</small></div>'
        for name, value, is_bad in tiles
    )
    return f'<div class="tiles">{"".join(shown)}</div>'
