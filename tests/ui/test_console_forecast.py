"""The page of the forecast, from which an operator spreads a peak."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from delaytasks import NewTask
from delaytasks.console.viewers import Role
from delaytasks.operate import forecast
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, healthy_site, make_delays, write_on_time
from tests.ui.test_console_bulk import confirm
from tests.ui.test_console_pages import heading

FITTING, PEAK = 600, 3000


@pytest.fixture
def peak(sqlite_path: Callable[..., str]) -> Iterator[Site]:
    """A deployment without workers, in which many tasks become due at the same time."""
    site = Site(make_delays(sqlite_path()))
    schedule_peak(site, FITTING)
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
    peak.delays.schedule_delay("order.close", {}, 3600 * 24)
    peak.forget()
    text = peak.client().get("/forecast?processes=1").text
    due, busy = re.findall(r'<svg class="chart".*?</svg>', text)
    assert due.count("<title>") == busy.count("<title>") > 24 * 7
    assert due.count(f"newsletter.send {FITTING}, other tags 0") == 1
    assert due.count("newsletter.send 0, other tags 1") == 1
    assert busy.count("% of the hour 1, more than the hour 0") == 1


def test_an_hour_that_is_too_full_is_a_warning(peak: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "ASSUMED_DURATION_S", 24.0)
    text = peak.client().get("/forecast?processes=2").text
    says = r"From .*: 600 tasks .* busy for 2h\. 4 processes would run them"
    assert re.search(says, heading(text))
    assert '<section class="verdict warn"' in text
    assert '<span class="bad-text">200%</span>' in text


def test_an_operator_spreads_a_peak(peak: Site) -> None:
    assert "/bulk?" not in peak.client(Role.VIEW).get("/forecast").text
    client = peak.client(Role.OPERATE)
    [link] = re.findall(r'href="(/bulk\?action=reschedule[^"]*)"', client.get("/forecast").text)
    question, text = confirm(client, link)
    assert heading(question) == f"Reschedule {FITTING} tasks?"
    assert f"{FITTING} changed" in text
    assert len({task.due for task in peak.delays.find(tag="newsletter.send", limit=FITTING)}) > 100


@pytest.mark.parametrize("query", ["processes=many", "processes=0"])
def test_a_wrong_question_is_explained(site: Site, query: str) -> None:
    answer = site.client().get(f"/forecast?{query}")
    assert answer.status_code == 400
    assert "This is not possible" in answer.text


# -- The overview shows the share of tasks on time -------------------------------------------------


@pytest.fixture
def quiet(sqlite_path: Callable[..., str]) -> Iterator[Site]:
    """A deployment with one process, in which nothing is wrong."""
    with healthy_site(sqlite_path()) as site:
        yield site


def schedule_peak(site: Site, tasks: int = PEAK) -> None:
    at = runtime_of(site.delays).clock.now().replace(microsecond=0) + timedelta(days=2)
    site.delays.schedule_many(NewTask("newsletter.send", {"to": n}, at=at) for n in range(tasks))


def test_the_overview_shows_the_share_on_time_of_each_tag(quiet: Site) -> None:
    assert 'aria-label="On time"' not in quiet.client().get("/").text
    write_on_time(quiet.delays, "mail", timedelta(), 98, 2)
    write_on_time(quiet.delays, "mail", timedelta(hours=5), 700, 200)
    write_on_time(quiet.delays, "alarm", timedelta(), 1000, 5)
    quiet.forget()
    text = quiet.client(Role.VIEW).get("/").text
    [card] = re.findall(r'aria-label="On time">.*?</table>', text, re.DOTALL)
    words = " ".join(re.sub(r"<[^>]*>", " ", card).split())
    assert "alarm – 99.50% 5 late 99.50% 5 late" in words
    assert words.endswith("mail – 98.00% 2 late 79.80% 202 late")
    assert card.count("bad-text") == 2, "the shares below 99 %"
