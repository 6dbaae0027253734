"""The page of tags, the page of one tag, and the charts of two days."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import event

from delaytasks import StoreUnavailableError
from delaytasks.console import pages
from delaytasks.console.pages import PERIODS
from delaytasks.console.viewers import Role
from delaytasks.run.observers import OTHER_TAGS
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, make_delays, write_runs

MINUTE = timedelta(minutes=1)


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


def test_the_page_of_tags_and_the_suggested_names_do_not_read_the_tasks(own_site: Site) -> None:
    store, seen = runtime_of(own_site.delays).store, list[str]()
    runtime_of(own_site.delays).clock.now()  # it reads the time of the database
    for engine in (store.database.auto, store.database.tx):
        event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    for period in PERIODS:
        assert rows(own_site.client().get(f"/tags?period={period}").text)
    assert seen
    assert all(store.schema.statistics.name in statement for statement in seen)
    with own_site.app.test_request_context():
        found = pages.known_names()
        assert found["tag"]
        assert not [each for each in seen if store.schema.tasks.name in each]
        seen.clear()
        assert pages.known_names() == found
        assert seen == [], "all viewers share them for a minute"


def test_a_day_of_many_tags_reads_the_busiest(empty: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        write_runs(empty.delays, f"tag.{number}", 2 * MINUTE, number + 1)
        write_runs(empty.delays, f"tag.{number}", 300 * MINUTE, 1)
    monkeypatch.setattr(pages, "MOST_CHART_ROWS", 18)
    client = empty.client()
    assert len(rows(client.get("/tags?period=day").text)) == 9
    empty.app.extensions["delaytasks_console"].history.forget()
    monkeypatch.setattr(pages, "count_rows", lambda *_: 3 * 1440 + 1)
    monkeypatch.setattr(pages, "MOST_CHART_ROWS", 3 * 1440)
    text = client.get("/tags?period=day").text
    assert [row["Tag"] for row in rows(text)] == ["tag.8", "tag.7", "tag.6"]
    assert "Only the 3 tags with the most runs in the last hour are counted" in text
    assert "Only the 3 tags" in client.get("/?period=day").text
    assert "<dt>Runs</dt><dd>2</dd>" in client.get("/tag?name=tag.0&period=day").text
    assert len(rows(client.get("/tags?period=hour").text)) == 9


# -- The tags and queues that the fields of the console suggest -----------------------------------


def suggested(client: FlaskClient, path: str, field: str) -> list[str]:
    """Return what a browser suggests for the last field of this name."""
    text: str = client.get(path).text
    found = re.findall(rf'<input name="{field}"[^>]* list="([^"]+)"', text)
    [options] = re.findall(rf'<datalist id="{found[-1]}">(.*?)</datalist>', text)
    return [html.unescape(each) for each in re.findall(r'<option value="([^"]*)">', options)]


def test_a_limited_number_of_tags_of_workers_policies_and_statistics_are_suggested(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = runtime_of(own_site.delays).store.workers
    workers.report("celery@shop-3", ["default"], "prefork", 8, 0, ["of.a.worker"])
    write_runs(own_site.delays, "of.statistics", timedelta(minutes=2), 1)
    own_site.delays.policies.pause(tag="of.a.policy")
    client, others = own_site.client(Role.ADMIN), ["mail.send", "order.close", "pay.notify"]
    tags = sorted([*others, "of.a.policy", "of.a.worker", "of.statistics"])
    for path in ("/tasks", "/recurring", "/policies"):
        assert suggested(client, path, "tag") == tags
    monkeypatch.setattr(pages, "MOST_SUGGESTED", 4)
    own_site.delays.policies.pause(tag="z.policy")
    own_site.app.extensions["delaytasks_console"].history.forget()
    tags = suggested(client, "/tasks", "tag")
    assert (len(tags), "z.policy" in tags) == (4, True), "those of policies stay"


def test_pages_are_shown_without_statistics_and_names(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("the database is gone")

    client, store = own_site.client(Role.VIEW), runtime_of(own_site.delays).store
    monkeypatch.setattr(type(own_site.delays.statistics), "series", fail)
    for path in ("/tags", "/tag?name=mail.send"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "The statistics cannot be read: the database is gone" in answer.text
    own_site.app.extensions["delaytasks_console"].history.forget()
    monkeypatch.setattr(type(store.policies), "read", fail)
    monkeypatch.setattr(type(store.workers), "registered", fail)
    assert suggested(client, "/tasks", "queue") == ["default"]
    assert suggested(client, "/tasks", "tag") == []
