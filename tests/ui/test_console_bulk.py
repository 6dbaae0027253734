"""Bulk actions of the console: count, confirm, progress and stop."""

from __future__ import annotations

import html
import re
import threading
from typing import Any

import pytest
from werkzeug.datastructures import MultiDict

from delaytasks.console import queries
from delaytasks.console.viewers import Role
from delaytasks.operations import bulk_calls as bulk
from delaytasks.operations.single_tasks import find_tasks
from tests.ui.console_site import Site, post
from tests.ui.test_console_pages import heading
from tests.waiting import wait_until


def finish(client: Any, location: str) -> str:
    def ended() -> str | None:
        text: str = client.get(location).text
        return None if ">running</span>" in text else text

    return wait_until(ended, 30, "the bulk run") or ""


def confirm(client: Any, link: str) -> tuple[str, str]:
    """Open the page that counts, and start what it offers; return both pages."""
    question = client.get(html.unescape(link)).text
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', question)
    # Browsers send the line ends of a form like this.
    fields = MultiDict((name, html.unescape(value).replace("\n", "\r\n")) for name, value in found)
    return question, finish(client, client.post("/bulk", data=fields).location)


def test_a_group_of_failures_runs_again_after_a_count(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    links = re.findall(r'href="(/bulk\?action=rerun[^"]*)"', client.get("/failures").text)
    [link] = [each for each in links if "report.build" in each]
    question, text = confirm(client, link)
    assert heading(question) == "Run again 9 tasks?"
    assert "report.build" not in client.get("/failures").text, "the counts are fresh"
    counts = re.search(r"<progress.*?</p>", text, re.DOTALL)
    assert "9 changed, 0 left as they were" in text, counts and counts[0]
    assert len(delays.find(tag="report.build", status="NOT_COMPLETE")) == 9
    assert len(delays.find(tag="pay.notify", status="FAILED")) == 4, "other groups stay"


def test_the_retries_of_a_group_of_failures_are_cancelled(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    [retrying] = delays.find(tag="pay.notify", status="NOT_COMPLETE").tasks
    other = delays.schedule_delay("pay.notify", {"port": 1}, 3600)
    [link] = {
        link
        for group in re.findall(r'href="(/failures/\w+)"', client.get("/failures").text)
        for link in re.findall(r'href="([^"]*)">Cancel their retries', client.get(group).text)
        if "pay.notify" in link
    }
    question, text = confirm(client, link)
    assert heading(question) == "Cancel 1 task?"
    assert "1 changed, 0 left as they were" in text
    assert delays.get(retrying.id).status.name == "CANCELLED"
    assert delays.get(other.id).status.name == "NOT_COMPLETE", "it has not failed yet"
    assert len(delays.find(tag="pay.notify", status="FAILED")) == 4


def test_a_bulk_cancel_is_taken_back_from_the_audit_page(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    before = len(delays.find(tag="order.close", status="NOT_COMPLETE", limit=1000))
    finish(client, post(client, "/bulk", action="cancel", tag="order.close").location)
    assert len(delays.find(tag="order.close", status="NOT_COMPLETE")) == 0
    [entry] = [entry for entry in delays.audit() if entry.filter.get("tag") == "order.close"]
    [path] = re.findall(rf'action="(/audit/{entry.id}/rerun)"', client.get("/audit").text)
    text = finish(client, post(client, path).location)
    assert f"{before} changed, 0 left as they were" in text
    assert len(delays.find(tag="order.close", status="NOT_COMPLETE", limit=1000)) == before
    assert (delays.audit()[0].action, delays.audit()[0].actor) == ("rerun", "maria")


def test_a_bulk_run_that_is_stopped_leaves_the_rest(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    before = len(delays.find(tag="order.close", status="NOT_COMPLETE", limit=1000))
    has_begun, may_go_on, cancel_many = threading.Event(), threading.Event(), delays.cancel_many

    def cancel_slowly(**options: Any) -> Any:
        report = options.pop("on_progress")

        def wait_and_report(result: Any) -> None:
            has_begun.set()
            assert may_go_on.wait(30)
            report(result)

        return cancel_many(**options, on_progress=wait_and_report)

    monkeypatch.setattr(bulk, "BULK_ROWS", 10)
    monkeypatch.setattr(delays, "cancel_many", cancel_slowly)
    page = post(client, "/bulk", action="cancel", tag="order.close").location
    assert has_begun.wait(30)
    assert f'action="{page}/stop"' in client.get(page).text
    assert post(client, f"{page}/stop").location == page
    may_go_on.set()
    text = finish(client, page)
    assert ">stopped</span>" in text
    assert f"10 changed, 0 left as they were, of {before}." in text
    assert len(delays.find(tag="order.close", status="CANCELLED", limit=1000)) == 10
    [stopped] = [entry for entry in delays.audit(limit=2) if entry.action == "cancel"]
    assert (stopped.state, stopped.changed) == ("stopped", 10)


def test_a_bulk_action_without_a_filter_is_refused(own_site: Site) -> None:
    client = own_site.client()
    assert client.get("/bulk?action=cancel").status_code == 400
    assert post(client, "/bulk", action="cancel").status_code == 400
    assert own_site.delays.find(status="CANCELLED", tag="order.close").tasks == []


def test_a_bulk_action_leaves_out_the_chosen_statuses_that_cannot_move(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    before = len(delays.find(tag="order.close", status="NOT_COMPLETE", limit=1000))
    chosen = {"action": "cancel", "tag": "order.close", "status": ["NOT_COMPLETE", "DONE"]}
    assert heading(client.get("/bulk", query_string=chosen).text) == f"Cancel {before} tasks?"
    answer = post(client, "/bulk", **chosen)
    assert answer.status_code == 303, answer.text
    finish(client, answer.location)
    assert len(delays.find(tag="order.close", status="CANCELLED", limit=1000)) == before


def test_the_count_before_a_bulk_action_reads_small_pages(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    def finding(runtime: Any, filters: Any, cursor: Any, limit: int, *others: Any) -> Any:
        limits.append(limit)
        return find_tasks(runtime, filters, cursor, limit, *others)

    monkeypatch.setattr(queries, "find_tasks", finding)
    text = site.client().get("/bulk?action=cancel&queue=default").text
    assert int(re.findall(r"\d+", heading(text))[0]) > 100
    assert len(limits) > 1
    assert max(limits) <= 100, "a page contains the bodies"
