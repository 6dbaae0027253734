"""Each page of the console in Chromium: in light, dark and phone width, and with axe-core."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks.console.application import make_console
from delaytasks.console.requests import UserFile
from tests.ui.chromium import MODES, watched
from tests.ui.console_site import Site, served

pytestmark = pytest.mark.slow

AXE = Path(__file__).parent / "axe/axe-4.14.1.min.js"
#: The rules of WCAG 2.0 to 2.2, levels A and AA, and axe-core's best practices.
RUN_AXE = """() => axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa",
    "wcag22aa", "best-practice"]})"""
NAMES = """overview tasks task tags tag failures recurring policies queues
    workers audit bulk run missing""".split()


def paths_of(site: Site) -> dict[str, str]:
    task = site.delays.find(status="FAILED", tag="pay.notify").tasks[0]
    special = {
        "overview": "/",
        "tasks": "/tasks?tag=order.close",
        "task": f"/tasks/{task.id}",
        "tag": "/tag?name=order.close",
        "bulk": "/bulk?action=cancel&tag=order.close",
        "run": site.begun_run("order.close"),
        "missing": "/nothing",
    }
    return {name: special.get(name, f"/{name}") for name in NAMES}


def check_page(page: Any) -> None:
    """Check that a page is accessible, and not wider than its window."""
    # axe-core is loaded by the test, past the policy of the page.
    page.evaluate(AXE.read_text())
    found = page.evaluate(RUN_AXE)
    assert len(found["passes"]) > 10
    violations = [
        (each["id"], [node["html"][:200] for node in each["nodes"]][:3])
        for each in found["violations"]
    ]
    assert violations == []
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(too_wide) <= 0


@pytest.mark.parametrize("name", NAMES)
def test_each_page_is_accessible_and_fits(site: Site, address: str, page: Any, name: str) -> None:
    page.goto(address + paths_of(site)[name])
    check_page(page)


def test_the_login_page_is_accessible_and_fits(site: Site, page: Any, tmp_path: Path) -> None:
    with served(make_console(site.delays, UserFile(tmp_path / "users.json"))) as address:
        page.goto(address)
        check_page(page)
        page.get_by_label("Name").fill("maria")
        page.get_by_label("Password").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("The name or the password is wrong.").wait_for()
        check_page(page)


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Any]:
    context = browser.new_context(**MODES["light"])
    opened = context.new_page()
    opened.goto(address)
    yield opened
    context.close()


def test_the_keyboard_opens_pages_the_palette_and_rows(tab: Any) -> None:
    tab.keyboard.press("g")
    tab.keyboard.press("t")
    tab.wait_for_url("**/tasks")
    tab.keyboard.press("j")
    assert tab.locator("tr.chosen").count() == 1
    tab.keyboard.press("Enter")
    tab.wait_for_url(re.compile(r"/tasks/\d+$"))
    tab.keyboard.press("Control+k")
    tab.keyboard.type("audit")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/audit")
    tab.keyboard.press("?")
    assert tab.locator("#keys").is_visible()


def test_a_dangerous_action_is_confirmed_first(tab: Any, site: Site, address: str) -> None:
    task = site.delays.find(tag="order.close", status="NOT_COMPLETE").tasks[-1]
    tab.goto(f"{address}/tasks/{task.id}")
    tab.get_by_role("button", name="Cancel", exact=True).click()
    tab.locator("#confirm").get_by_role("button", name="No").click()
    assert site.delays.get(task.id).status.name == "NOT_COMPLETE"
    tab.get_by_role("button", name="Cancel", exact=True).click()
    tab.locator("#confirm").get_by_role("button", name="Yes").click()
    tab.get_by_text("The task was cancelled at").wait_for()
    assert site.delays.get(task.id).status.name == "CANCELLED"


def test_a_page_follows_what_happens(tab: Any, site: Site, address: str) -> None:
    task = site.delays.schedule_delay("order.close", {"order": 1}, 3600)
    tab.goto(f"{address}/tasks/{task.id}")
    tab.locator("h1 .status.waiting").wait_for()
    site.delays.cancel(task)
    tab.locator("h1 .status.cancelled").wait_for(timeout=20_000)


def test_actions_work_without_scripts(browser: Any, own_site: Site) -> None:
    task = own_site.delays.find(tag="order.close", status="NOT_COMPLETE").tasks[0]
    with served(own_site.app) as address:
        context = browser.new_context(java_script_enabled=False)
        opened = context.new_page()
        opened.goto(f"{address}/tasks/{task.id}")
        opened.get_by_role("button", name="Cancel", exact=True).click()
        opened.get_by_text("The task was cancelled at").wait_for()
        context.close()
    assert own_site.delays.get(task.id).status.name == "CANCELLED"


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_a_button_copies_the_shown_text(site: Site, browser: Any, has_clipboard: bool) -> None:
    task = site.delays.find(tag="pay.notify", status="FAILED").tasks[0]
    with served(site.app) as address, watched(browser) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        if not has_clipboard:  # as in pages that came by HTTP from another host
            hide = "Object.defineProperty(Navigator.prototype, 'clipboard', {value: undefined})"
            page.add_init_script(f"window.reader = navigator.clipboard; {hide}")
        page.goto(f"{address}/tasks/{task.id}")
        page.get_by_role("button", name="Copy the error", exact=True).press("Enter")
        copied = page.locator("[role=status]", has_text=re.compile("^Copied$"))
        copied.wait_for(state="attached")
        text = page.evaluate("(window.reader || navigator.clipboard).readText()")
        assert text == task.error == page.locator("#task-error").text_content()
