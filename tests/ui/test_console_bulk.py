"""Bulk actions of the console: count, confirm, progress and stop."""

from __future__ import annotations

import html
import re
import threading
from typing import Any

import pytest
from werkzeug.datastructures import MultiDict

from delaytasks import StoreUnavailableError
from delaytasks.console import forms
from delaytasks.console.requests import Role
from delaytasks.operate import task_calls as bulk
from tests.ui.chromium import MODES, watched
from tests.ui.console_site import Site, post, served
from tests.ui.test_console_pages import heading
from tests.waiting import wait_until


def finish(client: Any, location: str) -> str:
    def ended() -> str | None:
        text: str = client.get(location).text
        return None if ">running</span>" in text else text

    return wait_until(ended, 30, "the bulk run") or ""


def confirm(client: Any, link: str, **chosen: str) -> tuple[str, str]:
    """Open the page that counts, and start what it offers; return both pages."""
    question = client.get(html.unescape(link)).text
    [(action, form)] = re.findall(
        r'<form method="post" action="(/do/\w+)">(<input type="hidden".*?)</form>',
        question.partition("<main")[2],
        re.DOTALL,
    )
    found = re.findall(r'<input (?:type="hidden" )?name="(\w+)" value="([^"]*)"', form)
    # Browsers send the line ends of a form like this.
    fields = MultiDict((name, html.unescape(value).replace("\n", "\r\n")) for name, value in found)
    for name, value in chosen.items():
        fields[name] = value
    return question, finish(client, client.post(action, data=fields).location)


def test_a_group_of_failures_runs_again_or_its_retries_are_cancelled(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    listed = client.get("/failures").text
    [link] = re.findall(r'href="(/bulk\?action=rerun[^"]*report.build[^"]*)"', listed)
    question, text = confirm(client, link)
    assert heading(question) == "Run again 9 tasks?"
    assert "9 changed, 0 left as they were" in text
    assert len(delays.find(tag="report.build", status="NOT_COMPLETE")) == 9
    assert "report.build" not in client.get("/failures").text, "the counts are fresh"
    [retrying] = delays.find(tag="pay.notify", status="NOT_COMPLETE").tasks
    other = delays.schedule_delay("pay.notify", {"port": 1}, 3600)
    [link] = re.findall(r'href="(/bulk\?action=rerun[^"]*pay.notify[^"]*)"', listed)
    link = link.replace("action=rerun", "action=cancel").replace("=FAILED", "=NOT_COMPLETE")
    question, text = confirm(client, link)
    assert heading(question) == "Cancel 1 task?"
    assert "1 changed, 0 left as they were" in text
    assert states(own_site, [retrying.id, other.id]) == ["CANCELLED", "NOT_COMPLETE"]
    assert len(delays.find(tag="pay.notify", status="FAILED")) == 4, "other groups stay"


def test_an_action_whose_tasks_are_being_found_leads_to_the_audit_page(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, rerun = threading.Event(), bulk.Bulk.rerun

    def find_slowly(*arguments: Any, **options: Any) -> Any:
        assert may_go_on.wait(30)
        return rerun(*arguments, **options)

    monkeypatch.setattr(bulk.Bulk, "rerun", find_slowly)
    monkeypatch.setattr(forms, "BEGIN_S", 0.05)
    client, log = own_site.client(Role.OPERATE), own_site.delays.bulk.log
    answer = post(client, "/do/rerun", tag="report.build")
    assert (answer.status_code, answer.location) == (303, "/audit")
    assert "The tasks are being found." in client.get("/audit").text
    before = len(log())
    may_go_on.set()
    wait_until(lambda: len(log()) > before and log()[0].state == "done", 30, "the entry")


def test_a_bulk_action_that_fails_says_why_or_is_failed(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, fields = own_site.client(Role.OPERATE), {"tag": "order.close"}
    later = StoreUnavailableError("the database is gone")

    def fail(*_: Any, **__: Any) -> Any:
        raise later

    monkeypatch.setattr(bulk.BulkRun, "_step", fail)
    answer = post(client, "/do/cancel", **fields)
    assert (answer.status_code, "the database is gone" in answer.text) == (503, True)
    [entry] = own_site.delays.bulk.log(limit=1)
    text = client.get(f"/audit/{entry.id}").text
    assert "Cancel: failed" in heading(text)
    assert "The log of the process has the error." in text


# -- The viewer selects some rows of a list of tasks, and acts on them ----------------------------


def link_of(action: str, ids: list[int]) -> str:
    """Return the address that a browser opens with the form of the list."""
    return f"/bulk?{'&'.join(f'ids={id}' for id in ids)}&action={action}"


def waiting(site: Site, count: int) -> list[int]:
    tasks = site.delays.find(tag="order.close", status="NOT_COMPLETE", limit=count)
    return [task.id for task in tasks]


def states(site: Site, ids: list[int]) -> list[str]:
    return [site.delays.get(id).status.name for id in ids]


def test_selected_tasks_are_changed_and_run_again_by_their_entry(own_site: Site) -> None:
    client, many = own_site.client(Role.OPERATE), waiting(own_site, 40)
    question, text = confirm(client, link_of("cancel", many))
    assert heading(question) == "Cancel 40 tasks?"
    assert "40 changed, 0 left as they were, of 40." in text
    for shown in (question, text, client.get("/audit").text):
        assert re.search(r"ids: \d+, \d+, \d+ and 37 more</span>", shown)
    entry = own_site.delays.bulk.log(limit=1)[0]
    assert f'name="entry" value="{entry.id}"' in client.get("/audit").text
    assert "40 changed" in finish(client, post(client, "/do/rerun", entry=entry.id).location)
    assert states(own_site, many) == ["NOT_COMPLETE"] * 40
    failed = own_site.delays.find(tag="pay.notify", status="FAILED").tasks[0]
    question, text = confirm(client, link_of("rerun", [failed.id, *many[:2]]))
    assert heading(question) == "Run again 1 task?"
    assert "You have selected 3 tasks. The others have another status now" in question
    assert "1 changed, 0 left as they were, of 1." in text


@pytest.mark.parametrize("ids", ["", "ids=seven", "ids=0", "ids=1,2"])
def test_a_wrong_selection_is_refused(site: Site, ids: str) -> None:
    client = site.client(Role.OPERATE)
    assert client.get(f"/bulk?action=cancel&{ids}").status_code == 400
    fields = dict([ids.split("=")]) if ids else {}
    assert post(client, "/do/cancel", **fields).status_code == 400


# -- in a browser ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_live_view_does_not_change_a_selection(site: Site, browser: Any) -> None:
    with served(site.app) as address, watched(browser, **MODES["light"]) as page:
        page.clock.install()
        page.goto(f"{address}/tasks?tag=order.close")
        asked: list[str] = []
        page.on("request", lambda sent: asked.append(sent.url) if "/tasks" in sent.url else None)
        page.keyboard.press("j")
        page.keyboard.press("x")
        assert page.locator("[data-select]:checked").count() == 1
        page.clock.run_for(10_000)
        assert asked == []
        page.keyboard.press("x")
        with page.expect_request(re.compile("/tasks")):
            page.clock.run_for(1_000)
