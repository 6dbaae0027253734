"""The buttons that copy the id, the body and the errors of a task."""

from __future__ import annotations

import re
from typing import Any

import pytest

from delaytasks.console.viewers import Role
from tests.ui.chromium import watched
from tests.ui.console_site import Site, served
from tests.ui.test_console_in_a_browser import check_page

COPIES = ("the id", "the body", "the error")


def test_a_viewer_who_sees_no_body_cannot_copy_it(site: Site) -> None:
    task = site.delays.find(tag="pay.notify", status="FAILED").tasks[0]
    for role, copied in ((Role.VIEW, {"id", "error"}), (Role.OPERATE, {"id", "error", "body"})):
        text = site.client(role).get(f"/tasks/{task.id}").text
        assert set(re.findall(r'data-copy="task-(\w+)"', text)) == copied
        for id in re.findall(r'data-copy="([^"]+)"', text):
            assert text.count(f'id="{id}"') == 1


@pytest.mark.slow
@pytest.mark.parametrize("has_clipboard", [True, False])
def test_the_keyboard_copies_what_the_page_shows(
    site: Site, browser: Any, has_clipboard: bool
) -> None:
    task = site.delays.find(tag="pay.notify", status="FAILED").tasks[0]
    site.client(Role.OPERATE)
    with served(site.app) as address, watched(browser) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        if not has_clipboard:  # as in pages that came by HTTP from another host
            hide = "Object.defineProperty(Navigator.prototype, 'clipboard', {value: undefined})"
            page.add_init_script(f"window.reader = navigator.clipboard; {hide}")
        page.goto(f"{address}/tasks/{task.id}")
        for name in COPIES:
            button = page.get_by_role("button", name=f"Copy {name}", exact=True)
            button.focus()
            page.keyboard.press("Enter")
            page.locator("[role=status]", has_text=re.compile("^Copied$")).wait_for(
                state="attached"
            )
            assert page.evaluate("document.activeElement.dataset.copy") is not None
            text = page.evaluate("(window.reader || navigator.clipboard).readText()")
            shown = page.locator(f"#{'task-' + name.removeprefix('the ')}").text_content()
            assert text == shown
        assert str(task.error) == text
        check_page(page)


@pytest.mark.slow
def test_a_copy_that_is_refused_is_reported(site: Site, browser: Any) -> None:
    task = site.delays.find(tag="pay.notify", status="FAILED").tasks[0]
    with served(site.app) as address, watched(browser) as page:
        page.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new Error())")
        page.goto(f"{address}/tasks/{task.id}")
        page.get_by_role("button", name="Copy the id").click()
        page.locator("[role=status]", has_text="Not copied").wait_for(state="attached")
