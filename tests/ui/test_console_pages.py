"""The pages of the console, and the actions of their forms."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from delaytasks import StoreUnavailableError
from delaytasks.console import pages
from delaytasks.console.pages import PERIODS, SEARCH_S
from delaytasks.console.requests import Role
from delaytasks.db.sweep_queries import ServiceTimes
from delaytasks.model.clock import UTC
from delaytasks.model.text import installed_version
from delaytasks.operate.task_calls import SearchTimeoutError
from delaytasks.run.observers import OTHER_TAGS
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, chart_titles, fill, make_delays, post, write_runs

MINUTE = timedelta(minutes=1)
PAGES = "/ /tasks /tags /failures /recurring /policies /queues /workers /audit".split()


def heading(text: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", text, re.DOTALL)
    assert found is not None
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", "", found[1]))).strip()


# -- pages ----------------------------------------------------------------------------------------


def test_all_pages_work_on_each_database(database_url: str) -> None:
    site = Site(make_delays(database_url, table_prefix="console_"))
    fill(site.delays)
    client = site.client()
    task = site.delays.find(status="FAILED").tasks[0]
    more = "/tasks?error=template /?period=two+days /tags?period=day /tag?name=order.close"
    for path in (*PAGES, f"/tasks/{task.id}", *more.split()):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "cannot be read" not in answer.text, path
        assert answer.text.count("<h1") == 1, path
        assert answer.text.rstrip().endswith("</html>"), path
    titles = chart_titles(client.get("/?period=hour").text, charts=3)
    assert re.search(r"UTC: done \d+, retried \d+, failed \d+", titles)
    assert re.search(r"p99: 99 of 100 began earlier \d{3}ms", titles)
    text = client.get("/").text
    assert heading(text) == "! On time, but 14 tasks failed."
    assert re.search(r"9 tasks of report\.build have failed since .*no template", text)
    assert "The tag mail.send is paused by maria" in text
    text = client.get("/workers").text
    assert re.findall(r'data-label="Busy" class="num">([^<]*)<', text) == ["1 of 8", "2 of 8"]
    assert re.findall(r'data-label="Version">([^<]*)<', text) == [installed_version()] * 2
    assert "Stop or restart a worker where it runs" in text
    store = runtime_of(site.delays).store
    store.schema.metadata.drop_all(store.database.tx)
    site.delays.close()


def test_tasks_that_are_due_soon_are_read_from_a_limited_number_of_queues(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = make_delays(f"sqlite:///{tmp_path / 'queues.sqlite3'}")
    for number in range(4):
        delays.schedule_delay("order.close", {}, 90, queue=f"queue-{number}")
    store = runtime_of(delays).store
    assert sum(pages.count_due(store, store.database.now())) == 4
    monkeypatch.setattr(pages, "MOST_QUEUES", 3)
    assert sum(pages.count_due(store, store.database.now())) == 3
    delays.close()


def test_tasks_are_found_by_pages_and_by_id(site: Site) -> None:
    client, seen, path = site.client(), list[str](), "/tasks?tag=order.close&order=oldest"
    while path:
        text = client.get(path).text
        seen += re.findall(r'href="/tasks/(\d+)"', text)
        path = html.unescape(next(iter(re.findall(r'<a rel="next" href="([^"]+)"', text)), ""))
    assert seen == [str(task.id) for task in site.delays.find(tag="order.close", limit=1000)]
    assert client.get(f"/tasks?id={seen[0]}").location == f"/tasks/{seen[0]}"
    assert client.get("/tasks?id=x").status_code == 400
    answer = client.get("/tasks?since=yesterday")
    assert (answer.status_code, 'role="alert"' in answer.text) == (200, True)


def test_a_slow_search_asks_to_narrow_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def find(*arguments: Any) -> Any:
        limits.append(arguments[-1])
        raise SearchTimeoutError("the search took longer than 5 s: narrow its filter")

    monkeypatch.setattr(pages, "find_tasks", find)
    client = site.client()
    for path in ("/tasks?tag=nothing", "/tasks?error=timeout", "/bulk?action=cancel&tag=nothing"):
        answer = client.get(path)
        assert "narrow its filter" in answer.text, path
        assert answer.status_code == (503 if "bulk" in path else 200)
    assert all(0 < limit_s <= SEARCH_S for limit_s in limits)


def test_times_reasons_and_charts_are_in_the_zone_of_the_viewer(own_site: Site) -> None:
    client, delays = own_site.client(), own_site.delays
    failed = delays.find(status="FAILED", tag="report.build").tasks[0]
    delays.bulk.cancel(tag="order.close", until=datetime(2030, 1, 31, 18, tzinfo=UTC))
    workers, lost = runtime_of(delays).store.workers, ServiceTimes(None, 7200)
    workers.report("celery@a", ["default"], "prefork", 2, 0, services=lost)
    hours, at = list[int](), failed.update_time
    assert at is not None
    for zone, ahead in (("UTC", timedelta()), ("JST", timedelta(hours=9))):
        text, page = client.get("/").text, client.get(f"/tasks/{failed.id}").text
        since = rf"the server of its timer since .*?(\d\d):\d\d {zone} \(2h\)"
        hours += map(int, re.findall(since, text))
        assert f"It failed at {at + ahead:%Y-%m-%d %H:%M:%S} {zone}: " in page
        assert f">{failed.due + ahead:%Y-%m-%d %H:%M:%S} {zone}" in page
        assert {*re.findall(r">(UTC|JST)</text>", text)} == {zone}, "the charts"
        post(client, "/preferences", zone="Asia/Tokyo")
        assert post(client, "/preferences", zone="Nowhere/At_All").status_code == 303
    utc, jst = hours
    assert (utc + 9) % 24 == jst
    assert "until: 2030-02-01 03:00:00 JST" in client.get("/audit").text


# -- tags and their statistics ---------------------------------------------------------------------


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Site]:
    """A console without tasks and runs."""
    made = Site(make_delays(f"sqlite:///{tmp_path / 'tags.sqlite3'}"))
    yield made
    made.delays.close()


def rows(text: str) -> list[dict[str, str]]:
    """Return the cells of each row of the table by their labels."""
    found = []
    for row in re.findall(r"<tr data-row>(.*?)</tr>", text, re.DOTALL):
        cells = re.findall(r'<td data-label="([^"]*)"[^>]*>(.*?)</td>', row, re.DOTALL)
        found.append({name: html.unescape(re.sub("<[^>]*>", "", it)).strip() for name, it in cells})
    return found


def test_the_page_of_tags_has_a_row_for_each_tag_sorted_by_runs(empty: Site) -> None:
    write_runs(empty.delays, "mail.send", 2 * MINUTE, 40, 3)
    write_runs(empty.delays, "mail.send", 9 * MINUTE, 2)
    write_runs(empty.delays, "order.close", 2 * MINUTE, 50)
    text = empty.client(Role.VIEW).get("/tags").text
    first, second = rows(text)
    assert (first["Tag"], first["Runs"], first["Failed runs"]) == ("order.close", "50", "0")
    assert (second["Tag"], second["Runs"], second["Failed runs"]) == ("mail.send", "42", "3")
    assert re.fullmatch(r"\d+ms", second["Lateness p50"])
    assert second["Duration p99"] == "300ms"
    spark = re.findall(r'<svg class="spark".*?</svg>', text, re.DOTALL)[1]
    assert spark.count("<rect") == 2
    assert "at most 40 in one of" in spark
    assert 'href="/tag?name=mail.send&amp;period=hour"' in text
    assert 'href="/tasks?tag=mail.send"' in text


@pytest.mark.parametrize("tag", ["..", "a/../b", "?x=1&y", "# x", "ü", OTHER_TAGS])
def test_the_link_of_each_tag_leads_to_its_page(empty: Site, tag: str) -> None:
    write_runs(empty.delays, tag, 2 * MINUTE, 4)
    write_runs(empty.delays, "other", 2 * MINUTE, 90)
    client = empty.client()
    text = client.get("/tags").text
    # There are no tasks of all other tags.
    assert text.count("/tasks?tag=") == (1 if tag == OTHER_TAGS else 2)
    [path] = re.findall(r'href="(/tag\?name=(?!other&)[^"]*)"', text)
    page = client.get(html.unescape(path)).text
    assert f'<h1><span class="tag">{html.escape(tag)}</span></h1>' in page
    assert "<dt>Runs</dt><dd>4</dd>" in page
    for name in ("", "x" * 200):
        assert client.get("/tag", query_string={"name": name}).status_code == 400


def test_the_page_of_tags_does_not_read_the_tasks(own_site: Site) -> None:
    store, seen = runtime_of(own_site.delays).store, list[str]()
    runtime_of(own_site.delays).clock.now()  # it reads the time of the database
    for engine in (store.database.auto, store.database.tx):
        event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    for period in PERIODS:
        assert rows(own_site.client().get(f"/tags?period={period}").text)
    assert seen
    assert all(store.schema.statistics.name in statement for statement in seen)


def test_pages_are_shown_without_statistics(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("the database is gone")

    client = own_site.client(Role.VIEW)
    monkeypatch.setattr(type(own_site.delays.statistics), "series", fail)
    for path in ("/tags", "/tag?name=mail.send"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "The statistics cannot be read: the database is gone" in answer.text


# -- actions --------------------------------------------------------------------------------------


def test_a_notice_says_what_was_done_to_a_task(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    task = delays.find(tag="order.close", status="NOT_COMPLETE").tasks[0]
    page = f"/tasks/{task.id}"
    answer = post(client, "/do/cancel", id=task.id, version=task.version, next=page)
    assert (answer.status_code, answer.location) == (303, page)
    text = client.get(page).text
    assert re.search(r"The task was cancelled at \d\d:\d\d:\d\d UTC\.<", text)
    post(client, "/do/cancel", id=task.id, version=0)
    assert 'class="notice bad"' in client.get("/").text


@pytest.mark.parametrize("number", ["\N{SUPERSCRIPT TWO}", "1" * 5000, "x", "-1"])
def test_a_text_that_is_no_number_is_refused(site: Site, number: str) -> None:
    client = site.client()
    assert client.get(f"/tasks/{number}").status_code == 400
    assert client.get(f"/audit/{number}").status_code == 400
    assert post(client, "/do/rerun", entry=number).status_code == 400
    for fields in ({"version": number}, {}):
        assert post(client, "/do/cancel", id=number, **fields).status_code == 303


# -- the forms of recurring schedules and of limits -----------------------------------------------


def form_of(text: str, action: str = "/do/recurring-set") -> dict[str, str]:
    """Return what a browser sends if a viewer changes nothing in the form of this action."""
    [form] = re.findall(
        rf'<form method="post" action="{action}" class="fields".*?</form>', text, re.DOTALL
    )
    fields: dict[str, str] = {}
    for field in re.findall(r"<input[^>]*>", form):
        [name] = re.findall(r' name="(\w+)"', field)
        [fields[name], *_] = re.findall(r' value="([^"]*)"|$', field)
    for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', form):
        [fields[name], *_] = re.findall(r"<option selected>(\w+)|$", options)
    fields |= re.findall(r'<textarea name="(\w+)"[^>]*>(.*?)</textarea>', form, re.DOTALL)
    return {name: html.unescape(value) for name, value in fields.items()}


def test_the_form_adds_a_schedule_and_replaces_none(own_site: Site) -> None:
    client, recurring = own_site.client(Role.ADMIN), own_site.delays.recurring
    fields = form_of(client.get("/recurring").text)
    fields |= {"name": "feeds", "tag": "report.build", "cron": "0 4 * * *"}
    client.post("/do/recurring-set", data=fields)
    assert "there is a schedule feeds already" in client.get("/recurring").text
    assert recurring.get("feeds").tag == "feed.read"
    rules = {"jitter": "10s", "missed": "all", "retries": "15s 3m", "body": '{"order": 1}'}
    client.post("/do/recurring-set", data={**fields, "name": "early", **rules})
    stored = recurring.get("early")
    assert (stored.tag, stored.timing, stored.missed) == ("report.build", "0 4 * * *", "all")
    assert (stored.jitter_s, stored.body) == (10, {"order": 1})
    assert 'action="/do/recurring-set"' not in own_site.client(Role.OPERATE).get("/recurring").text


LIMITS = "/do/limit"


def limits(site: Site, tag: str) -> Any:
    [policy] = site.delays.policies.list(tag=tag)
    return policy.concurrency, policy.concurrency_per_key, policy.rate_text


def test_administrators_change_limits_one_by_one(own_site: Site) -> None:
    client = own_site.client(Role.ADMIN)
    [link] = re.findall(r'href="(/policies\?tag=[^"]*)"', client.get("/policies").text)
    assert link == "/policies?tag=pay.notify#edit", "mail.send is paused and has no limits"
    fields = form_of(client.get(link).text, LIMITS)
    assert fields["tag"] == "pay.notify"
    client.post(LIMITS, data={**fields, "concurrency": "20"})
    assert limits(own_site, "pay.notify") == (20, None, "100/s")
    client.post(LIMITS, data={**fields, "rate": "none"})
    assert limits(own_site, "pay.notify") == (20, None, None)
    new = form_of(client.get("/policies").text, LIMITS)
    client.post(LIMITS, data={**new, "tag": "pay.notify", "concurrency_per_key": "1"})
    assert limits(own_site, "pay.notify") == (20, 1, None), "those without a value stay"
