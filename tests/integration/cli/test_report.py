"""`report` writes one HTML file that loads nothing, with the state of the deployment."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks import NewTask
from delaytasks.cli.reporting.data import MOST_STEPS, step_of
from delaytasks.core.clock import from_us, to_us
from delaytasks.core.durations import parse_duration
from delaytasks.core.run_counts import FailureCount, RunCounts
from delaytasks.statistics.charts import Series, lines, stacked_bars
from delaytasks.statistics.queries import StatisticsTable
from delaytasks.statistics.worker_counts import Unwritten, WorkerCounts
from delaytasks.storage.types import db_now_plus
from delaytasks.wiring import wiring_of
from tests.integration.cli.project import HOSTILE, Project

VOID = {"meta", "br"}
HTML = '<script>alert(1)</script><img src="http://x.example/">'


class Page(HTMLParser):
    """The page with its elements, each of which has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def count_runs(shop: Project, tag: str, done: int, failed: int = 0, late_s: float = 0.01) -> None:
    """Write statistics, as a worker does."""
    store, counts, unwritten = wiring_of(shop.delays).store, RunCounts(), Unwritten()
    for _ in range(done + failed):
        counts.add_run(late_s, 0.2, None)
    counts.add_outcome("done", done)
    counts.add_outcome("failed", failed)
    now = store.tasks.now()
    minute = to_us(now) // 60_000_000 - 5
    unwritten.add_run(minute, tag, counts)
    if failed:
        pattern = f"ValueError: {HTML} *"
        hour = minute // 60
        failure = FailureCount(tag, pattern, failed, 7, pattern)
        unwritten.failures[(hour, tag, pattern)] = failure
    table = StatisticsTable(store.database, store.schema)
    store.database.transaction(lambda c: table.add(c, unwritten, from_us(to_us(now))))


@pytest.fixture
def served(shop: Project) -> Project:
    store = wiring_of(shop.delays).store
    store.workers.report("w1@host", ["*"], "prefork", 2, 0, ["ok", "mail", "bad"])
    store.sweeps.begin_sweep(0, 1, 4.0)
    return shop


@pytest.fixture
def report(tmp_path: Path, served: Project) -> Callable[..., tuple[Any, Page]]:
    def write(*options: str) -> tuple[Any, Page]:
        path = tmp_path / "r.html"
        document = served.json("report", "-o", str(path), *options)
        return document, Page(path.read_text())

    return write


def test_the_report_of_a_healthy_deployment_has_a_good_verdict(
    report: Callable[..., Any], served: Project
) -> None:
    count_runs(served, "ok", 30)
    document, page = report("--title", "Shop & more")
    assert (document["verdict"], document["findings"]) == ("good", [])
    assert "On time." in page.text
    assert "Shop & more" in page.text
    assert re.search(r"\b30\s+runs done\b", page.text)


def test_the_verdict_names_each_problem(report: Callable[..., Any], served: Project) -> None:
    count_runs(served, "ok", 80, failed=20, late_s=20)
    task, store = served.schedule("nobody"), wiring_of(served.delays).store
    t = store.schema.tasks
    with store.database.begin() as connection:
        due = {"expected_time": db_now_plus(-90)}
        connection.execute(update(t).where(t.c.id == task.id).values(**due))
    served("pause", "--tag", "mail")
    document, page = report()
    assert document["verdict"] == "bad"
    sentences = {finding["text"]: finding["level"] for finding in document["findings"]}
    shown = "\n".join(sentences)
    assert "1 task of nobody is overdue by up to 1m" in shown
    assert sentences["20.0% of the tasks of the tag ok failed (20)."] == "bad"
    assert re.search(r"one run in 100 started \d+s late .* tag ok\.", shown)
    assert re.search(r"^The tag mail is paused", shown, re.M)
    assert list(sentences.values()) == sorted(
        sentences.values(), key=["bad", "warning", "note"].index
    ), "the most important first"
    assert re.search(r"Late\. 1 task is overdue, the oldest by 1m", page.text)


def test_failed_runs_that_are_retried_are_in_each_verdict(
    report: Callable[..., Any], served: Project
) -> None:
    served.delays.schedule_many(NewTask("bad", {}, delay=0, retries="1h") for _ in range(8))
    counted = served.delays.runner().run_due("default", range(10), limit=100)
    store = wiring_of(served.delays).store
    counts = WorkerCounts([wiring_of(served.delays).clock], 10)
    counts.add(0, counted.statistics)
    table = StatisticsTable(store.database, store.schema)
    store.database.transaction(lambda c: table.add(c, counts.take(0), store.tasks.now()))
    sentence = r"8 runs of bad have failed since \d\d:\d\d UTC, and will be retried: ValueError"
    document, page = report()
    found = [document["findings"][0]]
    found += [served.json(name)["verdict"]["problems"][0] for name in ("stats", "top")]
    for problem in found:
        assert problem["level"] == "warning"
        assert re.match(sentence, problem["text"])
    assert "On time, but 8 runs have failed and will be retried." in page.text
    assert re.search(sentence, served("stats").stdout)


def test_if_tasks_wait_and_no_worker_is_alive_the_verdict_is_bad(
    shop: Project, tmp_path: Path
) -> None:
    shop.schedule("ok", delay=60)
    document = shop.json("report", "-o", str(tmp_path / "r.html"))
    assert (document["headline"], document["verdict"]) == ("Stopped. No worker is alive.", "bad")
    sentences = [finding["text"] for finding in document["findings"]]
    assert "No worker is alive, and 1 task is waiting. Start a worker." in sentences


def test_the_page_loads_no_resources_and_escapes_untrusted_text(
    report: Callable[..., Any], served: Project
) -> None:
    count_runs(served, HTML, 80, failed=20)
    served.schedule("ok", delay=60, body={"secret": "s3cret"})
    task, store = served.schedule("ok", delay=90), wiring_of(served.delays).store
    t = store.schema.tasks
    with store.database.begin() as connection:
        hostile = {"tag": HOSTILE[:100], "queue": HTML}
        connection.execute(update(t).where(t.c.id == task.id).values(**hostile))
    _, page = report()
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "a"}
    attributes = {name for _, attrs in page.elements for name in attrs}
    assert not attributes & {"src", "href", "onclick", "xlink:href"}
    policy = next(attrs for tag, attrs in page.elements if "http-equiv" in attrs)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert HTML in page.text, "it is text"
    assert "\x1b" not in page.text
    assert "s3cret" not in page.text


def test_the_page_is_printed_if_the_file_is_a_dash(served: Project) -> None:
    said = served("report", "-o", "-").stdout
    assert said.startswith("<!doctype html>")
    assert "wrote" not in said


def test_a_file_that_cannot_be_written_is_an_error(served: Project, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "r.html"
    error = served.error("report", "-o", str(path), exit_code=2)
    assert "cannot be written" in error["error"]


@pytest.mark.parametrize(
    ("since", "step"), [("1h", "1m"), ("1d", "15m"), ("7d", "2h"), ("365d", "7d")]
)
def test_a_chart_has_few_steps(since: str, step: str) -> None:
    assert step_of(parse_duration(since)) == parse_duration(step)
    assert parse_duration(since) / parse_duration(step) <= MOST_STEPS


def test_bars_are_stacked_to_the_height_of_their_sum() -> None:
    starts, step = [from_us(0), from_us(60_000_000)], parse_duration("1m")
    parts = [Series("done", "done", [60, 0]), Series("failed", "failed", [40, None])]
    chart = stacked_bars(starts, step, parts)
    bars = re.findall(
        r'<rect class="(done|failed)" [^>]* y="([\d.]+)" [^>]*height="([\d.]+)"', chart
    )
    assert [name for name, _, _ in bars] == ["done", "failed"]
    (_, y, height), (_, upper_y, upper_height) = bars
    assert float(upper_y) + float(upper_height) == pytest.approx(float(y), abs=0.2)
    assert float(height) / float(upper_height) == pytest.approx(1.5, abs=0.02)
    assert "1970-01-01 00:00 to 00:01 UTC: done 60, failed 40" in chart


def test_the_labels_of_an_axis_are_short() -> None:
    starts, step = [from_us(0), from_us(60_000_000)], parse_duration("1m")

    def labels(chart: str) -> list[str]:
        *found, zone = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', chart)
        assert zone == "UTC"
        return found

    assert labels(stacked_bars(starts, step, [Series("due", "due", [240_000, 0])])) == [
        "0", "100k", "200k", "300k",
    ]  # fmt: skip
    for seconds, expected in (
        ([109.0, 217.0], ["1m", "10m"]),
        ([0.004, 7200.0], ["1ms", "10ms", "100ms", "1.0s", "10s", "1m", "10m", "1h", "10h"]),
        ([1e9, None], ["3d", "4w"]),
        ([1e-9, None], ["1ms", "10ms"]),
    ):
        assert labels(lines(starts, step, [Series("late", "p99", seconds)])) == expected


def test_a_step_without_runs_is_a_gap_in_a_line() -> None:
    starts = [from_us(n * 60_000_000) for n in range(5)]
    chart = lines(starts, parse_duration("1m"), [Series("p99", "p99", [0.1, 0.2, None, 0.1, 10])])
    points = re.findall(r'<polyline class="line p99" points="([^"]*)"', chart)
    assert [len(each.split()) for each in points] == [2, 2]
    assert "p99 –" in chart
