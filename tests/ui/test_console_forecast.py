"""The page of the forecast, from which an operator spreads a peak."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from delaytasks import NewTask
from delaytasks.console.viewers import Role
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, make_delays, post
from tests.ui.test_console_bulk import finish
from tests.ui.test_console_pages import heading

PEAK = 600


@pytest.fixture
def peak(tmp_path: Path) -> Iterator[Site]:
    """A deployment without workers, in which many tasks become due at the same time."""
    site = Site(make_delays(f"sqlite:///{tmp_path / 'peak.sqlite3'}"))
    at = runtime_of(site.delays).clock.now().replace(microsecond=0) + timedelta(days=2)
    site.delays.schedule_many(NewTask("newsletter.send", {"to": n}, at=at) for n in range(PEAK))
    yield site
    site.delays.close()


def test_the_forecast_says_when_the_peak_is_and_how_many_workers_it_needs(peak: Site) -> None:
    text = peak.client(Role.VIEW).get("/forecast?workers=2&processes=1&target=5s").text
    # A process is assumed to run about 20 tasks in a second.
    late = (
        r"600 tasks of newsletter\.send, which 2 workers would start up to 1\ds late, and "
        r"4 workers up to \ds late\.$"
    )
    assert re.search(late, heading(text)), heading(text)
    needed = (
        r"Queues default: 2 workers with 2 processes .*; [678] workers would start each task at"
    )
    assert re.search(needed, text)
    assert "No worker is alive" in text
    assert '<section class="verdict warn"' in text
    relaxed = peak.client().get("/forecast?workers=2&processes=1&target=1m").text
    assert '<section class="verdict good"' in relaxed
    quick = peak.client().get("/forecast?workers=100&processes=8").text
    assert heading(quick).startswith("✓ On time")


def test_the_charts_have_each_step_and_tag(peak: Site) -> None:
    peak.delays.schedule_delay("order.close", {}, 3600 * 24)
    text = peak.client().get("/forecast").text
    due, late = re.findall(r'<svg class="chart".*?</svg>', text)
    assert due.count("<title>") == late.count("<title>") > 24 * 7
    assert due.count(f"newsletter.send {PEAK}, other tags 0") == 1
    assert due.count("newsletter.send 0, other tags 1") == 1
    assert re.search(r"these workers \d+s, twice as many \d", late)
    assert late.count("these workers on time, twice as many on time") > 24 * 6
    assert late.count(">on time</text>") == 1, "the label of the bottom"


def test_an_operator_spreads_a_peak(peak: Site) -> None:
    assert "action=spread" not in peak.client(Role.VIEW).get("/forecast").text
    client = peak.client(Role.OPERATE)
    page = "/forecast?workers=2&processes=1"
    [link] = re.findall(r'href="(/bulk\?action=spread[^"]*)"', client.get(page).text)
    text = client.get(html.unescape(link)).text
    assert heading(text) == f"Spread {PEAK} tasks?"
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', text)
    fields = {name: html.unescape(value) for name, value in found}
    run = post(client, "/bulk", **{**fields, "delay": "10m"}).location
    assert f"{PEAK} changed" in finish(client, run)
    assert len({task.due for task in peak.delays.find(tag="newsletter.send", limit=PEAK)}) > 100
    assert heading(client.get(page).text).startswith("✓ On time")


@pytest.mark.parametrize("query", ["workers=many", "workers=0", "target=soon", "tag=" + "x" * 200])
def test_a_wrong_question_is_explained(site: Site, query: str) -> None:
    answer = site.client().get(f"/forecast?{query}")
    assert answer.status_code == 400
    assert "This is not possible" in answer.text
