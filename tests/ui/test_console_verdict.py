"""The sentences of the verdict: since when, how many, and where their links lead."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks import Status
from delaytasks.console.requests import ConsoleState
from delaytasks.console.viewers import Role
from delaytasks.core.workers import ServiceTimes
from delaytasks.operations.state import ServicesState
from delaytasks.runtime import runtime_of
from delaytasks.storage.state_queries import Stats
from delaytasks.storage.sweep_queries import OverdueRows
from delaytasks.storage.types import db_now_plus
from tests.recording import set_columns
from tests.ui.chromium import watched
from tests.ui.console_site import Site, make_delays, post, served
from tests.ui.test_console_in_a_browser import MODES, check_page
from tests.ui.test_console_pages import heading
from tests.world import status_columns

CLOCK = r"(?:\w+ \d+, )?\d\d:\d\d"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A deployment with one worker, in which nothing is wrong."""
    site = Site(make_delays(f"sqlite:///{tmp_path / 'verdict.sqlite3'}"))
    report(site)
    runtime_of(site.delays).sweeper.sweep(0)
    yield site
    site.delays.close()


def report(site: Site, name: str = "celery@a", **services: float) -> None:
    runtime_of(site.delays).store.workers.report(
        name, ["default"], "prefork", 2, 0, services=ServiceTimes(**services)
    )


def add(site: Site, number: int, status: Status, age_s: float = 60) -> None:
    """Add tasks of this status that were due some time ago."""
    store, tag = runtime_of(site.delays).store, "report.build"
    ids = [site.delays.schedule_delay(tag, {"order": 1}, 60).id for _ in range(number)]
    t, at = store.schema.tasks, db_now_plus(-age_s)
    with store.database.begin() as connection:
        statement = update(t).where(t.c.id.in_(ids))
        values: dict[str, Any] = {**status_columns(status), "expected_time": at}
        connection.execute(statement.values(**values, update_time=at, error_stack="E: no"))


def page(site: Site) -> str:
    site.app.extensions["delaytasks_console"].cache.forget()
    text: str = site.client(Role.VIEW).get("/").text
    return html.unescape(text)


def sentences(text: str) -> list[str]:
    return re.findall(r'<span id="problem-\d+">([^<]*)</span>', text)


# -- since when -----------------------------------------------------------------------------------


@pytest.fixture
def site_without_broker(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    services = ServicesState("eta", uses_broker=True)
    monkeypatch.setattr(ConsoleState, "_broker_error", lambda _: "OperationalError: refused")
    monkeypatch.setattr("delaytasks.console.requests.ServicesState", lambda *_: services)
    return site


def test_the_broker_has_not_answered_since_the_workers_lost_it(site_without_broker: Site) -> None:
    site = site_without_broker
    [sentence] = sentences(page(site))
    assert sentence.startswith("The broker does not answer; "), "the worker reaches it"
    store = runtime_of(site.delays).store
    set_columns(store, "workers", started_at=db_now_plus(-900))
    report(site, broker_down_s=200)
    [sentence] = sentences(page(site))
    assert re.fullmatch(
        rf"The broker has not answered since {CLOCK} UTC \(3m2\ds\); workers read the table, so "
        r"tasks start a few seconds late: OperationalError: refused",
        sentence,
    )


def test_since_when_is_in_the_zone_of_the_viewer(site: Site) -> None:
    report(site, timer_down_s=7200)
    client = site.client()
    utc = re.search(rf"the server of its timer since ({CLOCK}) UTC \(2h\)", client.get("/").text)
    post(client, "/preferences", zone="Asia/Tokyo")
    jst = re.search(rf"the server of its timer since ({CLOCK}) JST \(2h\)", client.get("/").text)
    assert utc is not None
    assert jst is not None
    hours = [int(found[1][-5:-3]) for found in (utc, jst)]
    assert (hours[0] + 9) % 24 == hours[1]


def test_a_limit_is_reached_since_its_oldest_task_was_due(site: Site) -> None:
    site.delays.policies.set(tag="report.build", rate="5/m")
    add(site, 2, Status.HELD, age_s=60)
    add(site, 1, Status.HELD, age_s=605)
    [sentence] = sentences(page(site))
    assert re.fullmatch(
        rf"3 tasks of report\.build wait for its limit \(rate 5/m\), the oldest since {CLOCK} UTC "
        r"\(10m\d+s\)\.",
        sentence,
    )


# -- how many -------------------------------------------------------------------------------------


def tile(text: str, label: str) -> str:
    found = re.search(rf'value">([^<]*)</span> <span class="label">{label}<', text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("status", "label", "sentence"),
    [
        (Status.HELD, "held", "{} tasks of report.build wait for its limit"),
        (Status.FAILED, "failed", "{} tasks of report.build have failed since"),
        (Status.NOT_COMPLETE, "overdue", "{} tasks of report.build are overdue by"),
    ],
)
def test_a_tile_has_the_number_of_the_sentence_while_tasks_move(
    site: Site, monkeypatch: pytest.MonkeyPatch, status: Status, label: str, sentence: str
) -> None:
    site.delays.policies.set(tag="report.build", concurrency=1)
    add(site, 3, status)
    count: Callable[..., Any] = Stats.counts
    overdue: Callable[..., Any] = OverdueRows.count

    def then_add(query: Callable[..., Any]) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            found = query(*arguments)
            add(site, 1, status)  # before the next query
            return found

        return work

    monkeypatch.setattr(Stats, "counts", then_add(count))
    monkeypatch.setattr(OverdueRows, "count", then_add(overdue))
    text = page(site)
    number = tile(text, label)
    assert int(number) == 5
    assert any(each.startswith(sentence.format(number)) for each in sentences(text)), text
    assert f"{number} tasks" in heading(text)


def test_the_headline_has_all_failed_tasks_as_the_tile_has(site: Site) -> None:
    add(site, 2, Status.FAILED)
    set_columns(
        runtime_of(site.delays).store, "tasks", tag="pay.notify", update_time=db_now_plus(-7200)
    )
    add(site, 3, Status.FAILED)
    text = page(site)
    assert tile(text, "failed") == "5"
    assert heading(text) == "! On time, but 5 tasks failed."
    first, second = sentences(text)
    assert first.startswith("3 tasks of report.build have failed since")
    assert second == "2 other tasks failed more than an hour ago."


def test_waiting_and_running_tasks_without_a_worker_are_counted_separately(site: Site) -> None:
    runtime_of(site.delays).store.workers.remove("celery@a")
    add(site, 2, Status.RUNNING)
    site.delays.schedule_delay("report.build", {}, 600)
    text = page(site)
    assert sentences(text)[0] == (
        "No worker is alive, and 1 task is waiting and 2 tasks are running. Start a worker."
    )
    assert (tile(text, "waiting"), tile(text, "running")) == ("1", "2")


# -- links ----------------------------------------------------------------------------------------


@pytest.fixture
def faulty(site: Site) -> Site:
    """A deployment with several problems, each of which another page shows."""
    site.delays.policies.set(tag="report.build", concurrency=1)
    add(site, 3, Status.HELD)
    add(site, 3, Status.FAILED)
    report(site, "celery@b", broker_down_s=200, beat_s=90)
    return site


def test_a_link_says_where_it_leads(faulty: Site) -> None:
    found = re.findall(r'<a href="([^"]*)" aria-describedby="[^"]*">(Show [^<]*)</a>', page(faulty))
    shown = {words: re.sub(r"/\w{12}$", "/…", path) for path, words in found}
    assert shown == {
        "Show these failures": "/failures/…",
        "Show the workers": "/workers",
        "Show the policies": "/policies",
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_links_have_short_names_and_their_sentences_as_descriptions(
    faulty: Site, browser: Any, mode: str
) -> None:
    with served(faulty.app) as address, watched(browser, **MODES[mode]) as tab:
        tab.goto(address)
        link = tab.get_by_role("link", name="Show these failures", exact=True)
        described = tab.locator(f"#{link.get_attribute('aria-describedby')}")
        assert described.inner_text().startswith("3 tasks of report.build have failed since")
        box = described.bounding_box()
        assert box["y"] + box["height"] < 850, "it is seen without scrolling"
        check_page(tab)
        link.click()
        tab.wait_for_url("**/failures/*")


@pytest.mark.slow
def test_the_link_of_a_silent_beat_leads_to_the_health(site: Site, browser: Any) -> None:
    report(site, beat_s=90)
    with served(site.app) as address, watched(browser, **MODES["phone"]) as tab:
        tab.goto(address)
        tab.get_by_role("link", name="Show the health", exact=True).click()
        tab.wait_for_url("**/#health")
        box = tab.get_by_role("heading", name="Health").bounding_box()
        assert 0 <= box["y"] < MODES["phone"]["viewport"]["height"]


DAY, TIME = r"\w{3} (\w{3} )?\d\d", r"\d\d:\d\d"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/", f"{TIME}|{DAY}"),
        ("/forecast?period=day", f"{TIME}|{DAY}"),
        ("/forecast", DAY),
        ("/forecast?period=month", DAY),
    ],
)
def test_the_labels_of_the_time_axis_do_not_overlap(
    site: Site, browser: Any, path: str, label: str
) -> None:
    site.delays.schedule_delay("report.build", {}, 600)
    with served(site.app) as address, watched(browser, **MODES["light"]) as tab:
        tab.goto(address + path)
        chart = tab.locator("svg.chart").first
        labels = chart.locator('text[text-anchor="middle"]').all()
        words = [each.text_content() for each in labels]
        assert len(words) >= 3
        assert all(re.fullmatch(label, word) for word in words), words
        boxes = [each.bounding_box() for each in labels]
        for left, right in pairwise(boxes):
            assert left["x"] + left["width"] < right["x"], words
        frame = chart.bounding_box()
        assert boxes[-1]["x"] + boxes[-1]["width"] <= frame["x"] + frame["width"]
