"""The viewer selects some rows of a list of tasks, and acts on them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks.console.viewers import Role
from delaytasks.runtime import runtime_of
from tests.conformance.store_rows import RUNNING
from tests.ui.chromium import watched
from tests.ui.console_site import Site, post, served
from tests.ui.test_console_bulk import confirm, finish
from tests.ui.test_console_in_a_browser import MODES, check_page
from tests.ui.test_console_pages import heading


def link_of(action: str, ids: list[int]) -> str:
    """Return the address that a browser opens with the form of the list."""
    return f"/bulk?{'&'.join(f'ids={id}' for id in ids)}&action={action}"


def waiting(site: Site, count: int) -> list[int]:
    tasks = site.delays.find(tag="order.close", status="NOT_COMPLETE", limit=count)
    return [task.id for task in tasks]


def states(site: Site, ids: list[int]) -> list[str]:
    return [site.delays.get(id).status.name for id in ids]


@pytest.mark.parametrize("path", ["/tasks", "/tasks?tag=pay.notify&status=FAILED", "group"])
def test_only_an_operator_can_select_rows(site: Site, path: str) -> None:
    client = site.client(Role.OPERATE)
    if path == "group":
        path = re.findall(r'href="(/failures/\w+)"', client.get("/failures").text)[0]
    text = client.get(path).text
    boxes = re.findall(r'<input type="checkbox" name="ids" value="(\d+)"', text)
    assert boxes == re.findall(r'href="/tasks/(\d+)"', text)
    assert boxes
    assert 'name="ids"' not in site.client(Role.VIEW).get(path).text


@pytest.mark.parametrize(
    ("status", "offered"),
    [
        ("status=FAILED", {"rerun"}),
        ("status=NOT_COMPLETE&status=RUNNING", {"cancel", "reschedule", "spread"}),
        ("status=DONE", set()),
        ("key_prefix=o", {"rerun", "cancel", "reschedule", "spread"}),
    ],
)
def test_only_actions_that_change_tasks_of_the_chosen_statuses_are_offered(
    site: Site, status: str, offered: set[str]
) -> None:
    text = site.client(Role.OPERATE).get(f"/tasks?{status}").text
    assert set(re.findall(r'href="/bulk\?action=(\w+)', text)) == offered
    assert set(re.findall(r'name="action" value="(\w+)"', text)) == offered - {"spread"}


def test_selected_tasks_are_cancelled_and_no_others(own_site: Site) -> None:
    client, ids = own_site.client(Role.OPERATE), waiting(own_site, 4)
    question, text = confirm(client, link_of("cancel", ids[:3]))
    assert heading(question) == "Cancel 3 tasks?"
    assert f"ids: {', '.join(map(str, ids[:3]))}</span>" in question
    assert "3 changed, 0 left as they were, of 3." in text
    assert states(own_site, ids) == ["CANCELLED"] * 3 + ["NOT_COMPLETE"]
    entry = own_site.delays.audit(limit=1)[0]
    assert (entry.action, entry.actor) == ("cancel", "maria")
    assert entry.filter == {"ids": [str(id) for id in sorted(ids[:3])]}
    [path] = re.findall(rf'action="(/audit/{entry.id}/rerun)"', client.get("/audit").text)
    assert "3 changed" in finish(client, post(client, path).location)
    assert states(own_site, ids) == ["NOT_COMPLETE"] * 4


def test_selected_tasks_are_rescheduled(own_site: Site) -> None:
    client, ids = own_site.client(Role.OPERATE), waiting(own_site, 2)
    before = [own_site.delays.get(id).due for id in ids]
    question, text = confirm(client, link_of("reschedule", ids[:1]))
    assert heading(question) == "Reschedule 1 task?"
    assert "1 changed, 0 left as they were" in text
    after = [own_site.delays.get(id).due for id in ids]
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_selected_failed_and_cancelled_tasks_run_again(own_site: Site) -> None:
    client, delays = own_site.client(Role.OPERATE), own_site.delays
    failed, other = delays.find(tag="pay.notify", status="FAILED").tasks[:2]
    cancelled, waits = waiting(own_site, 2)
    delays.cancel(cancelled)
    question, text = confirm(client, link_of("rerun", [failed.id, cancelled, waits]))
    assert heading(question) == "Run again 2 tasks?"
    assert "You have selected 3 tasks. The others have another status now" in question
    assert "2 changed, 0 left as they were, of 2." in text
    assert states(own_site, [failed.id, cancelled, other.id]) == [
        "NOT_COMPLETE", "NOT_COMPLETE", "FAILED",
    ]  # fmt: skip


def test_a_selected_task_that_moved_meanwhile_is_left_as_it_is(own_site: Site) -> None:
    client, ids = own_site.client(Role.OPERATE), waiting(own_site, 3)
    t = runtime_of(own_site.delays).store.schema.tasks
    with runtime_of(own_site.delays).store.database.begin() as connection:
        running = update(t).where(t.c.id == ids[0]).values(**RUNNING)
        connection.execute(running)
    own_site.delays.cancel(ids[1])
    answer = post(client, "/bulk", action="cancel", ids=[str(id) for id in ids], expected=3)
    text = finish(client, answer.location)
    assert "1 changed, 1 left as they were, of 2." in text
    assert states(own_site, ids) == ["RUNNING", "CANCELLED", "CANCELLED"]


def test_the_ids_of_many_tasks_are_shortened(own_site: Site) -> None:
    client, ids = own_site.client(Role.OPERATE), waiting(own_site, 40)
    question, text = confirm(client, link_of("cancel", ids))
    assert heading(question) == "Cancel 40 tasks?"
    for shown in (question, text, client.get("/audit").text):
        assert re.search(r"ids: \d+, \d+, \d+ and 37 more</span>", shown)
    assert states(own_site, ids) == ["CANCELLED"] * 40


@pytest.mark.parametrize("ids", ["", "ids=seven", "ids=0", "ids=1,2"])
def test_a_wrong_selection_is_refused(site: Site, ids: str) -> None:
    client = site.client(Role.OPERATE)
    assert client.get(f"/bulk?action=cancel&{ids}").status_code == 400
    fields = dict([ids.split("=")]) if ids else {}
    assert post(client, "/bulk", action="cancel", **fields).status_code == 400


def test_the_page_of_tasks_takes_ids(site: Site) -> None:
    client, ids = site.client(Role.OPERATE), waiting(site, 2)
    text = client.get(f"/tasks?ids={ids[0]}&ids={ids[1]}").text
    assert set(re.findall(r'href="/tasks/(\d+)"', text)) == {str(id) for id in ids}
    [link] = re.findall(r'href="(/bulk\?action=cancel[^"]*)"', text)
    assert heading(client.get(html.unescape(link)).text) == "Cancel 2 tasks?"


# -- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(params=MODES)
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    with watched(browser, **MODES[request.param], reduced_motion="reduce") as opened:
        yield opened


@pytest.mark.slow
def test_the_bar_shows_how_many_rows_are_selected(site: Site, address: str, page: Any) -> None:
    page.goto(f"{address}/tasks?tag=order.close")
    boxes = page.locator("[data-select]")
    cancel = page.locator(".selection button", has_text="Cancel…")
    assert not cancel.is_visible()
    boxes.nth(0).check()
    boxes.nth(2).check()
    assert page.locator("#selected").inner_text() == "2 selected:"
    assert cancel.is_visible()
    check_page(page)
    page.get_by_label("All on this page").check()
    assert page.locator("#selected").inner_text() == f"{boxes.count()} selected:"
    boxes.nth(1).uncheck()
    assert not page.get_by_label("All on this page").is_checked()
    page.get_by_label("All on this page").check()
    page.get_by_label("All on this page").uncheck()
    assert not cancel.is_visible()
    check_page(page)


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
