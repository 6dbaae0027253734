"""The page of the forecast, from which an operator spreads a peak."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from delaytasks import NewTask, forecast
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


def test_the_forecast_names_the_busiest_hour_and_whether_it_fits(peak: Site) -> None:
    text = peak.client(Role.VIEW).get("/forecast").text
    busy = (
        r"The processes suffice\. The busiest hour is \w+ \w+ \d+, \d\d:00 UTC: 600 tasks of "
        r"newsletter\.send keep \d+ process(es)? busy for \d+s\.$"
    )
    assert re.search(busy, heading(text)), heading(text)
    assert "No worker is alive" in text
    assert '<section class="verdict good"' in text


def test_an_hour_that_does_not_fit_is_a_warning(
    peak: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "ASSUMED_DURATION_S", 24.0)
    text = peak.client().get("/forecast?processes=2").text
    assert re.search(
        r"From .*: 600 tasks .* busy for 2h\. 4 processes would run them", heading(text)
    )
    assert '<section class="verdict warn"' in text
    assert '<span class="bad-text">200%</span>' in text


def test_the_charts_have_each_hour_and_the_largest_tag(peak: Site) -> None:
    peak.delays.schedule_delay("order.close", {}, 3600 * 24)
    text = peak.client().get("/forecast?processes=1").text
    due, busy = re.findall(r'<svg class="chart".*?</svg>', text)
    assert due.count("<title>") == busy.count("<title>") > 24 * 7
    assert due.count(f"newsletter.send {PEAK}, other tags 0") == 1
    assert due.count("newsletter.send 0, other tags 1") == 1
    assert busy.count("% of the hour 1, more than the hour 0") == 1


def test_an_operator_spreads_a_peak(peak: Site) -> None:
    assert "action=spread" not in peak.client(Role.VIEW).get("/forecast").text
    client = peak.client(Role.OPERATE)
    page = "/forecast"
    [link] = re.findall(r'href="(/bulk\?action=spread[^"]*)"', client.get(page).text)
    text = client.get(html.unescape(link)).text
    assert heading(text) == f"Spread {PEAK} tasks?"
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', text)
    fields = {name: html.unescape(value) for name, value in found}
    run = post(client, "/bulk", **{**fields, "delay": "10m"}).location
    assert f"{PEAK} changed" in finish(client, run)
    assert len({task.due for task in peak.delays.find(tag="newsletter.send", limit=PEAK)}) > 100


@pytest.mark.parametrize("query", ["processes=many", "processes=0"])
def test_a_wrong_question_is_explained(site: Site, query: str) -> None:
    answer = site.client().get(f"/forecast?{query}")
    assert answer.status_code == 400
    assert "This is not possible" in answer.text
