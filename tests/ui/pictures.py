"""Draws the pictures of docs/images/console: `python -m tests.ui.pictures`.

It needs Chromium, and pngquant makes the pictures small.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from itertools import product
from pathlib import Path

from sqlalchemy import delete, func, update

from delaytasks import DelayTasks, NewTask
from delaytasks.console.requests import EXTENSION
from delaytasks.runtime import runtime_of
from tests.ui import console_site
from tests.ui.chromium import MODES, chromium, draw_page, find_chromium
from tests.ui.console_site import Site, fill, make_delays, report_workers, served, write_runs
from tests.ui.test_console_in_a_browser import paths_of
from tests.world.recording import runner_of

FOLDER = Path(__file__).parents[2] / "docs/images/console"
#: The pictures of the docs.
PICTURES = "overview-light overview-phone tasks-light task-dark"
#: Pixels of a picture, and the tasks of a peak.
TALLEST, PEAK = 1600, 60_000
#: The runs of some tags in each minute of the last hour.
RUNS_OF_TAGS = {"mail.send": 90, "trial.end": 12, "report.build": 4}


def draw() -> None:
    os.chdir(tempfile.mkdtemp())
    delays = make_delays("sqlite:///shop.sqlite3")
    fill(delays)
    _rename(delays)
    _add_peak(delays)
    for minutes, (tag, runs) in product(range(60), RUNS_OF_TAGS.items()):
        write_runs(delays, tag, timedelta(minutes=minutes), runs + 3 * (minutes % 7))
    site = Site(delays)
    with served(site.app) as address, chromium(find_chromium()) as browser:
        for name, mode in (each.split("-") for each in PICTURES.split()):
            page = browser.new_context(**MODES[mode]).new_page()
            _keep_alive(site)
            path = paths_of(site)[name]
            page.goto(address + path)
            draw_page(page, FOLDER / f"{name}-{mode}.png", TALLEST)
    site.close()


def _add_peak(delays: DelayTasks) -> None:
    """Let many tasks become due at nine o'clock in two days."""
    now = runtime_of(delays).clock.now()
    nine = now.replace(hour=9, minute=0, second=0, microsecond=0) + timedelta(days=2)
    peak = (NewTask("newsletter.send", {"customer": n}, at=nine) for n in range(PEAK))
    delays.schedule_many(peak)


def _rename(delays: DelayTasks) -> None:
    """Replace the names of this machine, and leave out the hostile task."""
    store = runtime_of(delays).store
    tasks, attempts = store.schema.tasks, store.schema.attempts
    with store.database.begin() as connection:
        connection.execute(delete(tasks).filter_by(tag="hostile"))
        for table, column in ((tasks, tasks.c.error_stack), (attempts, attempts.c.error)):
            shown = func.replace(column, console_site.__file__, "/srv/shop/tasks.py")
            connection.execute(update(table).values({column.name: shown}))
            worker = update(table).where(table.c.worker.is_not(None))
            connection.execute(worker.values(worker="celery@shop-1"))
    found = [task.error or "" for task in delays.find(status="FAILED")]
    assert not any("console_site" in error for error in found)


def _keep_alive(site: Site) -> None:
    """Do what the workers of the pictures would have done: run what is due, and report."""
    delays = site.delays
    runner_of(delays).run_due("default", range(10), limit=100)
    report_workers(delays, busy=3)
    site.app.extensions[EXTENSION].cache.forget()


if __name__ == "__main__":
    draw()
