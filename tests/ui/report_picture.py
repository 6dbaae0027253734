"""A day of a shop for docs/images/report.png, which `python -m tests.ui.pictures pages` draws."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

from delaytasks import DelayTasks
from delaytasks.cli.reporting.data import gather
from delaytasks.cli.reporting.page import page_of
from delaytasks.core.clock import from_us
from delaytasks.core.run_counts import FailureCount, RunCounts
from delaytasks.statistics.gauges import Gauges
from delaytasks.statistics.queries import StatisticsTable
from delaytasks.statistics.worker_counts import MINUTE_US, Unwritten
from delaytasks.wiring import wiring_of
from tests.ui.chromium import draw_page

TALLEST = 1600
#: Minutes of a day, those between two counts, and those in which the mail server was away.
DAY, STEP, OUTAGE = 1440, 5, range(500, 545)
TIMEOUT = "ConnectionError: smtp.example: timeout after *s"


def draw_report(delays: DelayTasks, browser: Any, picture: Path) -> None:
    page = page_of(gather(delays, timedelta(days=1)), "Shop: the last day")
    file = Path("report.html").resolve()
    file.write_text(page)
    viewport = {"width": 1160, "height": 850}
    context = browser.new_context(viewport=viewport, color_scheme="light")
    draw_page(context.new_page(), file.as_uri(), picture, TALLEST)
    context.close()


def write_day(delays: DelayTasks) -> None:
    """Write what workers and sweeps would have counted, with an outage in the afternoon."""
    store, now = wiring_of(delays).store, wiring_of(delays).clock.now()
    table = StatisticsTable(store.database, store.schema)
    unwritten, failures = Unwritten(), Unwritten()
    [task, *_] = delays.find(tag="mail.send").tasks
    last = int(now.timestamp()) // 60
    for ago in range(60, DAY, STEP):
        minute, is_away = last - ago, ago in OUTAGE
        runs = int(900 + 600 * math.sin(ago / 230) + 70 * (ago % 4))
        _count(unwritten, minute, "order.close", runs, 0.01 + ago % 7 * 0.004, 0)
        _count(unwritten, minute, "mail.send", runs // 3, 25.0 if is_away else 0.02, 4 * is_away)
        if is_away:
            failure = FailureCount("mail.send", TIMEOUT, 4, task.id, TIMEOUT)
            failures.add_failure(minute // 60, failure)
        gauges = Gauges(overdue=150 * is_away, running=3 + ago % 5, workers=2)
        table.write_gauges(from_us(minute * MINUTE_US), gauges)
    with store.database.begin() as connection:
        table.add(connection, unwritten, now)
        table.add(connection, failures, now - timedelta(minutes=OUTAGE.start))


def _count(
    unwritten: Unwritten, minute: int, tag: str, runs: int, late_s: float, failed: int
) -> None:
    counts = RunCounts()
    counts.add_outcome("done", runs - failed)
    counts.add_outcome("failed", failed)
    for number in range(runs):
        counts.add_run(late_s * (1 + number % 9 / 4), 0.02 + number % 11 * 0.01, None)
    unwritten.add_run(minute, tag, counts)
