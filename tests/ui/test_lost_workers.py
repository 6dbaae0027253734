"""The console names a worker that was killed while others live."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks.cli.stats import read_deployment
from delaytasks.operations.verdict import Verdict, verdict_of
from delaytasks.runtime import runtime_of
from delaytasks.storage.types import db_now_plus
from tests.ui.console_site import Site, make_delays

LEASES = "run again elsewhere when their leases end."


@pytest.fixture
def site(tmp_path: Any) -> Iterator[Site]:
    """Return a site whose tasks are on time, with one live worker."""
    site = Site(make_delays(f"sqlite:///{tmp_path / 'lost.sqlite3'}"))
    report(site, "w0@alive")
    runtime_of(site.delays).sweeper.sweep(0)
    site.delays.schedule_delay("order.close", {"order": 1}, 60)
    yield site
    site.delays.close()


def report(site: Site, name: str) -> None:
    store = runtime_of(site.delays).store
    store.workers.report(name, ["default"], "prefork", 2, 0, ["order.close"])


def lose(site: Site, name: str) -> None:
    store = runtime_of(site.delays).store
    report(site, name)
    w = store.schema.workers
    with store.database.begin() as connection:
        connection.execute(update(w).where(w.c.name == name).values(seen_at=db_now_plus(-600)))
    assert store.workers.expire(site.delays.settings.silent_s) == [name]


def judge(site: Site) -> Verdict:
    return verdict_of(read_deployment(site.delays))


def test_a_lost_worker_is_a_note_while_tasks_are_on_time(site: Site) -> None:
    lose(site, "w1@host")
    verdict = judge(site)
    assert (verdict.level, verdict.headline) == ("note", "On time.")
    [problem] = verdict.problems
    assert re.fullmatch(
        r"Worker w1@host was lost at \d\d:\d\d UTC: it was killed, or its host is down\. "
        rf"Its tasks {LEASES}",
        problem.text,
    )
    assert (problem.level, problem.page) == ("note", "workers")
    assert problem.text in html.unescape(site.client().get("/").text)


def test_several_lost_workers_are_counted_and_the_last_ones_are_named(site: Site) -> None:
    for number in range(1, 5):
        lose(site, f"w{number}@host")
    [problem] = judge(site).problems
    assert re.fullmatch(
        r"4 workers were lost, the last one at \d\d:\d\d UTC: w4@host, w3@host, w2@host, …\. "
        rf"They were killed, or their hosts are down\. Their tasks {LEASES}",
        problem.text,
    )


def test_late_tasks_are_worse_than_a_lost_worker(site: Site) -> None:
    lose(site, "w1@host")
    store = runtime_of(site.delays).store
    with store.database.begin() as connection:
        connection.execute(update(store.schema.tasks).values(expected_time=db_now_plus(-430)))
    verdict = judge(site)
    assert verdict.headline.startswith("Late. 1 task is overdue")
    assert [problem.level for problem in verdict.problems] == ["bad", "note"]


def test_a_worker_that_reports_again_is_no_problem(site: Site) -> None:
    lose(site, "w1@host")
    report(site, "w1@host")
    verdict = judge(site)
    assert (verdict.level, verdict.problems) == ("good", [])
    assert "lost" not in site.client().get("/workers").text


@pytest.mark.parametrize("path", ["/", "/workers"])
def test_the_table_of_workers_shows_the_time_of_the_loss(site: Site, path: str) -> None:
    lose(site, "w1@host")
    text = site.client().get(path).text
    [row] = [each for each in re.findall(r"<tr>.*?</tr>", text, re.DOTALL) if "w1@host" in each]
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", row))
    assert re.search(
        r"w1@host lost \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC (now|\d+m?s ago) 10m\S* ago", words
    )


def test_the_page_names_lost_workers_if_no_other_one_is_left(site: Site) -> None:
    lose(site, "w1@host")
    runtime_of(site.delays).store.workers.remove("w0@alive")
    assert judge(site).headline == "Stopped. No worker is alive."
    text = site.client().get("/workers").text
    assert "w1@host" in text
    assert "Tags with a processor" not in text
