"""The verdict and the console show failures that are not among the FAILED tasks that are read."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from delaytasks import NewTask
from delaytasks.cli.status import read_deployment
from delaytasks.operations import state as state_module
from delaytasks.operations.verdict import Verdict, verdict_of
from delaytasks.runtime import runtime_of
from delaytasks.statistics.statistics_table import StatisticsTable, WorkerCounts
from delaytasks.storage import state_queries as failed_rows
from delaytasks.storage.types import db_now_plus
from tests.conformance.query_plans import plans
from tests.recording import runner_of, set_columns
from tests.ui.console_site import Site, make_delays

CLOCK = r"(\w+ \d+, )?\d\d:\d\d UTC"


class FailingShop:
    """A console, and a worker that runs what is due and writes its statistics."""

    def __init__(self, url: str) -> None:
        self.site = Site(make_delays(url, table_prefix="failing_"))
        self.delays, runtime = self.site.delays, runtime_of(self.site.delays)
        self.store = runtime.store
        self.store.workers.report("celery@a", ["default"], "prefork", 2, 0, ["pay.notify"])
        runtime.sweeper.sweep(0)

    def run(self, tag: str, number: int, **options: Any) -> None:
        """Run new tasks of a tag until all of them have failed once."""
        body = {"port": 443, "order": 7}
        self.delays.schedule_many(NewTask(tag, body, delay=0, **options) for _ in range(number))
        store, runner = self.store, runner_of(self.delays)
        counts = WorkerCounts(runtime_of(self.delays).clock, 10)
        while (report := runner.run_due("default", range(10), limit=100)).ran:
            counts.add(report.statistics)
        table = StatisticsTable(store.database, store.schema)
        with store.database.begin() as connection:
            table.add(connection, counts.take(), store.tasks.now())

    def verdict(self) -> Verdict:
        return verdict_of(read_deployment(self.delays))

    def page(self, path: str) -> str:
        self.site.app.extensions["delaytasks_console"].cache.forget()
        client: FlaskClient = self.site.client()
        answer = client.get(path)
        assert answer.status_code == 200
        return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", answer.text)))

    def group_page(self, tag: str) -> str:
        [name] = [g.name for g in read_deployment(self.delays).groups if g.tag == tag]
        return self.page(f"/failures/{name}")

    def close(self) -> None:
        self.store.schema.metadata.drop_all(self.store.database.tx)
        self.site.close()


@pytest.fixture
def shop(database_url: str) -> Iterator[FailingShop]:
    made = FailingShop(database_url)
    yield made
    made.close()


def texts(verdict: Verdict) -> str:
    return "\n".join(f"{problem.level}: {problem.text}" for problem in verdict.problems)


# -- more FAILED tasks than are read --------------------------------------------------------------


@pytest.fixture
def crowded(shop: FailingShop, monkeypatch: pytest.MonkeyPatch) -> FailingShop:
    """Four failures of one tag, and then 30 of another one, of which 20 are read."""
    for module in (failed_rows, state_module):
        monkeypatch.setattr(module, "MOST_FAILED", 20)
    shop.run("pay.notify", 4)
    shop.run("report.build", 30)
    return shop


def test_the_headline_has_the_number_of_all_failed_tasks(crowded: FailingShop) -> None:
    assert crowded.verdict().headline == "On time, but 34 tasks failed."


def test_a_number_that_is_a_lower_bound_is_marked_as_such(crowded: FailingShop) -> None:
    said = texts(crowded.verdict())
    assert re.search(
        rf"^bad: At least 20 tasks of report\.build have failed since {CLOCK}", said, re.M
    )
    assert "20 or more failed report.build" in crowded.group_page("report.build")
    assert "30 runs failed" in crowded.group_page("report.build")


def test_a_group_none_of_whose_tasks_was_read_is_named(crowded: FailingShop) -> None:
    said = texts(crowded.verdict())
    assert re.search(rf"^bad: 4 runs of pay\.notify have failed since {CLOCK}: Conn", said, re.M)
    assert "4 runs pay.notify" in crowded.page("/")
    assert re.search(r"1 or more 4 pay\.notify", crowded.page("/failures"))
    page = crowded.group_page("pay.notify")
    assert "1 or more failed pay.notify" in page
    assert "Run all again" in page


def test_since_is_the_first_failure_and_not_the_first_that_was_read(crowded: FailingShop) -> None:
    set_columns(crowded.store, "tasks", update_time=db_now_plus(3600))
    [group] = [g for g in read_deployment(crowded.delays).groups if g.tag == "report.build"]
    assert group.since is not None
    assert group.sample.failed_at is not None
    assert (group.sample.failed_at - group.since).total_seconds() > 1800


def test_the_last_tasks_are_found_by_their_ids(shop: FailingShop) -> None:
    shop.run("pay.notify", 3, retries="1h")
    shop.delays.schedule_many(NewTask("order.close", {}, delay=60) for _ in range(2000))
    store = shop.store
    ids = [task.id for task in shop.delays.find(tag="pay.notify")]
    found: list[Any] = []
    shown = plans(
        store, lambda: found.extend(failed_rows.rows_of(store.database, store.schema, ids))
    )
    assert len(found) == 3
    assert not re.search(r"Seq Scan|SCAN|'type': 'ALL'", shown), shown


# -- tasks that are retried -----------------------------------------------------------------------


def test_a_tag_whose_runs_all_fail_and_are_retried_is_a_warning(shop: FailingShop) -> None:
    shop.run("pay.notify", 50, retries="1h 2h")
    verdict = shop.verdict()
    assert verdict.level == "warning"
    assert verdict.headline == "On time, but 50 runs have failed and will be retried."
    [problem] = verdict.problems
    assert re.fullmatch(
        rf"50 runs of pay\.notify have failed since {CLOCK}, and will be retried: "
        r"ConnectionError: .* timed out",
        problem.text,
    )
    page = shop.page("/")
    assert problem.text in page
    assert "no task has the status FAILED" not in page
    assert "50 runs pay.notify" in page


def test_retried_failures_are_a_group_whose_retries_can_be_cancelled(shop: FailingShop) -> None:
    shop.run("pay.notify", 50, retries="1h 2h")
    listed = shop.page("/failures")
    assert "0 50 pay.notify" in listed
    assert "Cancel retries" in listed
    assert "Run again" not in listed
    page = shop.group_page("pay.notify")
    assert "50 failed runs pay.notify" in page
    assert "Cancel their retries" in page
    assert "Run all again" not in page
    assert page.count("waiting pay.notify") == 50, "the table has the tasks that wait"


def test_a_few_retried_failures_of_many_runs_are_a_note(shop: FailingShop) -> None:
    shop.run("order.close", 200)
    shop.run("pay.notify", 3, retries="1h")
    verdict = shop.verdict()
    assert (verdict.level, verdict.headline) == ("note", "On time.")
    assert texts(verdict).startswith("note: 3 runs of pay.notify have failed since")


def test_failures_that_are_repaired_are_no_problem(shop: FailingShop) -> None:
    shop.run("pay.notify", 50, retries="1h")
    shop.delays.bulk.cancel(tag="pay.notify")
    verdict = shop.verdict()
    assert (verdict.level, verdict.problems) == ("good", [])
    assert "no task has the status FAILED" in shop.page("/")
    assert "No task is failed, and no failed run waits" in shop.page("/failures")


def test_old_failures_that_wait_for_a_retry_are_a_note(shop: FailingShop) -> None:
    shop.run("pay.notify", 50, retries="1d")
    set_columns(shop.store, "failures", hours='{"1000": 50}', last_at=db_now_plus(-9000))
    verdict = shop.verdict()
    assert (verdict.level, verdict.headline) == ("note", "On time.")
    assert [problem.text for problem in verdict.problems] == [
        "Failed runs of pay.notify wait for a retry, but none is of the last hour."
    ]


def test_failed_tasks_of_a_group_are_named_before_its_retries(shop: FailingShop) -> None:
    shop.run("pay.notify", 10, retries="1h")
    shop.run("pay.notify", 2)
    verdict = shop.verdict()
    assert verdict.headline == "On time, but 2 tasks failed."
    [problem] = verdict.problems
    assert problem.text.startswith("2 tasks of pay.notify have failed since")
    assert "2 12 pay.notify" in shop.page("/failures")


# -- The console names a worker that was killed while others live ---------------------------------


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
    set_columns(store, "workers", {"name": name}, seen_at=db_now_plus(-600))
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
    set_columns(store, "tasks", expected_time=db_now_plus(-430))
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
