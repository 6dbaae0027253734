"""The sentences of the verdict: since when, how many, and where their links lead."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from delaytasks import NewTask, Status
from delaytasks.cli.status import read_deployment
from delaytasks.console import pages, requests
from delaytasks.console.requests import Role
from delaytasks.db.sweep_queries import ServiceTimes
from delaytasks.db.types import db_now_plus
from delaytasks.model.clock import AN_HOUR, hour_of
from delaytasks.operate import state
from delaytasks.operate.health import Verdict, verdict_of
from delaytasks.operate.statistics import StatisticsWriter
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, healthy_site, post
from tests.ui.test_console_pages import heading
from tests.world import status_columns
from tests.world.recording import runner_of, set_columns


@pytest.fixture
def site(sqlite_path: Callable[..., str]) -> Iterator[Site]:
    """A deployment with one worker, in which nothing is wrong."""
    with healthy_site(sqlite_path()) as site:
        yield site


def report(site: Site, name: str = "celery@a", **services: float) -> None:
    runtime_of(site.delays).store.workers.report(
        name, ["default"], "prefork", 2, 0, services=ServiceTimes(**services)
    )


def add(site: Site, number: int, status: Status, age_s: float = 60) -> None:
    """Add tasks of this status that were due some time ago."""
    values: dict[str, Any] = dict.fromkeys(("expected_time", "update_time"), db_now_plus(-age_s))
    values |= {**status_columns(status), "error_stack": "E: no"}
    for _ in range(number):
        task = site.delays.schedule_delay("report.build", {"order": 1}, 60)
        set_columns(runtime_of(site.delays).store, "tasks", {"id": task.id}, **values)


def page(site: Site) -> str:
    site.forget()
    text: str = site.client(Role.VIEW).get("/").text
    return html.unescape(text)


def sentences(text: str) -> list[str]:
    return re.findall(r'<span id="problem-\d+">([^<]*)</span>', text)


def judge(site: Site) -> Verdict:
    return verdict_of(read_deployment(site.delays))


def limit(site: Site) -> None:
    site.delays.policies.set(tag="report.build", rate="5/m")
    add(site, 2, Status.HELD)
    add(site, 1, Status.HELD, age_s=605)


def silence(site: Site) -> None:
    report(site, "celery@b")
    workers = {"name": "celery@b"}
    set_columns(runtime_of(site.delays).store, "workers", workers, seen_at=db_now_plus(-600))


def stop(site: Site) -> None:
    runtime_of(site.delays).store.workers.remove("celery@a")


def stop_at_work(site: Site) -> None:
    stop(site)
    add(site, 2, Status.RUNNING)
    site.delays.schedule_delay("report.build", {}, 600)


def lose(site: Site, workers: int = 1) -> None:
    store = runtime_of(site.delays).store
    for number in range(1, workers + 1):
        report(site, f"w{number}@host")
        seen = {"seen_at": db_now_plus(-600)}
        set_columns(store, "workers", {"name": f"w{number}@host"}, **seen)
        assert store.workers.expire(site.delays.settings.silent_s) == [f"w{number}@host"]


def lose_and_be_late(site: Site) -> None:
    site.delays.schedule_delay("order.close", {"order": 1}, 60)
    lose(site, 4)
    set_columns(runtime_of(site.delays).store, "tasks", expected_time=db_now_plus(-430))


CLOCK = r"(?:\w+ \d+, )?\d\d:\d\d UTC"
LEASES = r"run again elsewhere, at the latest when their leases end\."
LOST = rf"A lost worker was killed, or its host is down\. Its tasks {LEASES}"
#: What makes a fault, the level and the headline of the verdict, and a sentence of it.
FAULTS: list[tuple[Callable[[Site], None], str, str, str]] = [
    (limit, "warning", "On time, but 3 tasks wait for a limit.",
     r"3 tasks of report\.build wait for its limit \(rate 5/m\), the oldest since "
     rf"{CLOCK} \(10m\d+s\)\."),
    (lambda site: add(site, 2, Status.FAILED, age_s=7200), "note", "On time.",
     r"2 tasks failed more than an hour ago\."),
    (silence, "warning", "On time, but 1 worker is silent.",
     rf"The worker celery@b is silent\. If it is lost, its tasks {LEASES}"),
    (lambda site: report(site, "celery@alone", broker_down_s=200, timer_down_s=3), "warning",
     "On time.", rf"The worker celery@alone has not reached its broker since {CLOCK} \(3m2\ds\).*"),
    (lambda site: report(site, beat_s=90), "warning", "On time.",
     rf"No message of beat has arrived since {CLOCK} \(1m3\ds\)\..*"),
    (stop, "good", "Idle. No worker is alive, and no task waits.", ""),
    (stop_at_work, "bad", "Stopped. No worker is alive.",
     r"No worker is alive, and 1 task is waiting and 2 tasks are running\. Start a worker\."),
    (lose, "note", "On time.", rf"Worker w1@host was lost at {CLOCK}\. {LOST}"),
    (lose_and_be_late, "bad", "Late. 1 task is overdue, the oldest by 7m10s.",
     rf"4 workers were lost, the last one at {CLOCK}: w4@host, w3@host, w2@host and 1 more\. "
     rf"{LOST}"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "level", "headline", "sentence"), FAULTS)
def test_each_fault_has_a_headline_and_a_sentence(
    site: Site, make: Callable[[Site], None], level: str, headline: str, sentence: str
) -> None:
    make(site)
    verdict = judge(site)
    assert (verdict.level, re.sub(r"7m1\ds", "7m10s", verdict.headline)) == (level, headline)
    found = sentences(page(site))
    assert len(found) == len(verdict.problems)
    assert any(re.fullmatch(sentence, each) for each in found or [""]), found
    assert "server of its timer" not in str(found), "three seconds are not worth a sentence"


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

    def then_add(query: Callable[..., Any]) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            found = query(*arguments)
            add(site, 1, status)  # before the next query
            return found

        return work

    monkeypatch.setattr(state, "task_counts", then_add(state.task_counts))
    text = page(site)
    number = tile(text, label)
    assert int(number) == 4
    assert any(each.startswith(sentence.format(number)) for each in sentences(text)), text
    assert f"{number} tasks" in heading(text)


# -- Failures that are not among the FAILED tasks that are read, and lost workers -----------------


@pytest.fixture
def shop(database_url: str) -> Iterator[Site]:
    """A console on each database, whose worker runs what is due and writes its statistics."""
    with healthy_site(database_url, table_prefix="failing_") as site:
        yield site
        store = runtime_of(site.delays).store
        store.schema.metadata.drop_all(store.database.tx)


def run(site: Site, tag: str, number: int, **options: Any) -> None:
    """Run new tasks of a tag until all of them have failed once."""
    body = {"port": 443, "order": 7}
    site.delays.schedule_many(NewTask(tag, body, delay=0, **options) for _ in range(number))
    runner, writer = runner_of(site.delays), StatisticsWriter(runtime_of(site.delays))
    while (report := runner.run_due("default", range(10), limit=100)).ran:
        writer.add(report.statistics)
    writer.write()


def words_of(site: Site, path: str = "/") -> str:
    """Return the text of a page."""
    site.forget()
    answer = site.client().get(path)
    assert answer.status_code == 200
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", answer.text)))


def texts(verdict: Verdict) -> str:
    return "\n".join(f"{problem.level}: {problem.text}" for problem in verdict.problems)


# -- more FAILED tasks than are read --------------------------------------------------------------


def test_failures_beyond_those_that_are_read_are_counted(
    shop: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are four failures of one tag, and then 30 of another one, of which 20 are read."""
    monkeypatch.setattr(state, "MOST_FAILED", 20)
    run(shop, "pay.notify", 4)
    run(shop, "report.build", 30)
    verdict = judge(shop)
    assert verdict.headline == "On time, but 34 tasks failed.", "the number of all failed tasks"
    said = texts(verdict)
    lower_bound = rf"(?m)^bad: At least 20 tasks of report\.build have failed since {CLOCK}"
    assert re.search(lower_bound, said)
    listed = words_of(shop, "/failures")
    assert "20 or more report.build" in listed
    assert "Of 34 failed tasks, only those that were due last are counted" in listed


# -- tasks that are retried -----------------------------------------------------------------------


def test_a_tag_whose_runs_all_fail_and_are_retried_is_a_warning(shop: Site) -> None:
    run(shop, "pay.notify", 50, retries="1h 2h")
    verdict = judge(shop)
    assert verdict.level == "warning"
    assert verdict.headline == "On time, but runs of pay.notify fail and are retried."
    [problem] = verdict.problems
    assert re.fullmatch(
        r"50 runs of pay\.notify have failed in the last 15 minutes, and will be retried: "
        r"ConnectionError: .* timed out",
        problem.text,
    )
    page = words_of(shop)
    assert problem.text in page
    assert "no task has the status FAILED" not in page
    listed = words_of(shop, "/failures")
    assert "50 pay.notify" in listed
    assert "Cancel…" in listed
    assert "Run again…" not in listed
    [link] = re.findall(r'data-main href="([^"]*)"', shop.client().get("/failures").text)
    page = words_of(shop, html.unescape(link))
    assert page.count("waiting pay.notify") == 50, "the table has the tasks that wait"
    # Repaired failures are no problem.
    shop.delays.bulk.cancel(tag="pay.notify")
    verdict = judge(shop)
    assert (verdict.level, verdict.problems) == ("good", [])
    assert "no task has the status FAILED" in words_of(shop)
    assert "No failed run waits for its retry" in words_of(shop, "/failures")


def test_old_failures_that_wait_for_a_retry_are_no_problem(shop: Site) -> None:
    run(shop, "pay.notify", 50, retries="1d")
    store = runtime_of(shop.delays).store
    set_columns(store, "statistics", start=hour_of(store.tasks.now()) - 3 * AN_HOUR)
    assert judge(shop).problems == []


def test_viewers_share_the_overview_and_it_has_nothing_of_one_viewer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SNAPSHOT_S", 60.0)
    monkeypatch.setattr(pages, "SNAPSHOT_S", 60.0)
    made: list[Verdict] = []

    def judge(*arguments: Any) -> Verdict:
        made.append(verdict_of(*arguments))
        return made[-1]

    monkeypatch.setattr(pages, "verdict_of", judge)
    client = site.client(Role.VIEW)
    shared = client.get("/").text.partition('id="live"')[2].partition("</main>")[0]
    text = site.client(Role.ADMIN).get("/?other=1").text
    assert 'hx-get="/?other=1"' in text
    assert shared.partition(">")[2] in text
    assert "<form" not in shared
    assert len(made) == 1
    # A prefix, a period and a zone have their own one, and an action makes it anew.
    text = client.get("/", environ_overrides={"SCRIPT_NAME": "/delays"}).text
    assert 'href="/delays/failures"' in text
    assert 'aria-current="true">day<' in client.get("/?period=day").text
    assert client.get("/?period=what").status_code == 200
    assert len(made) == 3
    post(client, "/preferences", zone="Asia/Tokyo")
    assert "JST" in client.get("/").text
    post(client, "/do/pause", tag="mail.send")
    assert len(made) == 4
    assert "the tag mail.send is paused" in heading(client.get("/").text)
    assert len(made) == 5
