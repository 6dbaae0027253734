"""Draws the pictures of docs/images/console: `python -m tests.ui.pictures`. It needs Chromium, and
pngquant makes the pictures small."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, update

from delaytasks import DelayTasks
from delaytasks.wiring import wiring_of
from tests.ui import console_site
from tests.ui.console_site import Site, fill, make_delays, served
from tests.ui.test_console_in_a_browser import MODES, paths_of

FOLDER = Path(__file__).parents[2] / "docs/images/console"


def draw() -> None:
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(parents=True, exist_ok=True)
    os.chdir(tempfile.mkdtemp())
    delays = make_delays("sqlite:///shop.sqlite3")
    fill(delays)
    _rename(delays)
    site = Site(delays)
    program = shutil.which("chromium")
    with served(site.app) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        for mode, options in MODES.items():
            _report(delays)
            _draw_mode(browser.new_context(**options), mode, address, paths_of(site))
        browser.close()
    delays.close()


def _draw_mode(context: Any, mode: str, address: str, paths: dict[str, str]) -> None:
    page = context.new_page()
    for name, path in paths.items():
        page.goto(address + path)
        page.wait_for_load_state()
        picture = FOLDER / f"{name}-{mode}.png"
        height = page.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": min(height, 1600)}
        page.screenshot(path=picture, full_page=True, clip=clip)
        if shutil.which("pngquant"):
            command = ["pngquant", "128", "--force", "--output", str(picture), str(picture)]
            subprocess.run(command, check=True)


def _rename(delays: DelayTasks) -> None:
    """Replace the names of this machine, and leave out the hostile task."""
    store = wiring_of(delays).store
    tasks, attempts = store.schema.tasks, store.schema.attempts
    with store.database.begin() as connection:
        connection.execute(delete(tasks).where(tasks.c.tag == "hostile"))
        for table, column in ((tasks, tasks.c.error_stack), (attempts, attempts.c.error)):
            renamed = func.replace(column, console_site.__file__, "/srv/shop/tasks.py")
            connection.execute(update(table).values({column.name: renamed}))
        connection.execute(update(attempts).values(worker="celery@shop-1"))
        connection.execute(update(tasks).where(tasks.c.status != 0).values(worker="celery@shop-1"))
    found = [task.error or "" for task in delays.find(status="FAILED")]
    assert not any(re.search(r"console_site", error) for error in found)


def _report(delays: DelayTasks) -> None:
    """Let the workers of the pictures be alive."""
    store = wiring_of(delays).store
    for name, queues in (("celery@shop-1", ["default"]), ("celery@shop-2", ["default", "feeds"])):
        store.workers.report(name, queues, "prefork", 8, 1400, ["order.close", "pay.notify"])
    wiring_of(delays).sweeper.sweep(0)


if __name__ == "__main__":
    draw()
