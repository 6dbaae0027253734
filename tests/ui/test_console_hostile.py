"""The console shows the texts of callers, viewers and other programs as texts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from delaytasks import Status
from delaytasks.console.requests import Role, Viewer
from delaytasks.run.observers import error_pattern
from tests.ui.chromium import watched
from tests.ui.console_site import HOSTILE, Site, add_hostile, fill, make_delays, post, served

QUOTED = quote(HOSTILE, safe="")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A console in whose tables each text is hostile, and so is its viewer's name."""
    file = tmp_path_factory.mktemp("hostile") / "console.sqlite3"
    made = Site(make_delays(f"sqlite:///{file}"))
    fill(made.delays)
    add_hostile(made.delays)
    made.viewer = Viewer(HOSTILE, Role.ADMIN)
    yield made
    made.close()


def pages_of(site: Site) -> Mapping[str, int]:
    """Return the path of each page that shows hostile text, and how often it does so at least.

    Each page names the viewer once.
    """
    tasks = site.delays.find(tag=HOSTILE).tasks
    assert len(tasks) == 5
    [failed] = [task for task in tasks if task.status is Status.FAILED]
    group = urlencode({"tag": HOSTILE, "error": error_pattern(failed.error or "")})
    return {
        "/": 4,
        f"/tasks?tag={QUOTED}&key={QUOTED}&error={QUOTED}&meta=tenant%3D{QUOTED}": 5,
        f"/tasks?since={QUOTED}": 1,
        f"/tasks?tag={QUOTED}": 12,
        "/tasks?" + "&".join(f"ids={task.id}" for task in tasks): 11,
        f"/tasks?ids={QUOTED}": 1,
        **{f"/tasks/{task.id}": 6 for task in tasks},
        "/tags": 2,
        f"/tags?period=day&contains={QUOTED}": 3,
        f"/tag?name={QUOTED}": 3,
        f"/tag?period={QUOTED}&name={QUOTED}%2F..%2F": 2,
        "/failures": 3,
        f"/tasks?status=FAILED&{group}": 5,
        "/recurring": 5,
        "/policies": 5,
        f"/policies?tag={QUOTED}": 6,
        "/queues": 2,
        "/workers": 5,
        "/audit": 3,
        f"/bulk?action=cancel&tag={QUOTED}": 6,
        f"/bulk?action=rerun&ids={failed.id}": 2,
        site.begun_run(HOSTILE): 2,
        f"/tasks/1{QUOTED}": 1,
        f"/nope{QUOTED}": 1,
    }


def test_hostile_text_is_shown_as_text(hostile: Site) -> None:
    client = hostile.app.test_client()
    for path, times in pages_of(hostile).items():
        text = client.get(path).text
        assert "<img src=x" not in text, path
        assert "{49}" not in text, path
        assert html.unescape(text).count(HOSTILE) >= times, path
    post(client, "/do/pause", queue=HOSTILE)
    text = client.get("/").text
    [notice] = re.findall(r'<p class="notice bad">(.*?)</p>', text)
    assert HOSTILE[:9] in html.unescape(notice)
    assert "<img" not in notice


@pytest.mark.slow
def test_hostile_text_runs_no_script_in_a_browser(hostile: Site, browser: Any) -> None:
    paths = pages_of(hostile)
    with served(hostile.app) as address, watched(browser) as tab:
        for path in paths:
            tab.goto(address + path)
            check_tab(tab, path)
            if tab.locator("#live").count():  # a script inserts the rows of the live view
                with tab.expect_response(lambda answer: "/static/" not in answer.url):
                    tab.evaluate("htmx.trigger('#live', 'refresh')")
                # The policy of the pages forbids the text of a function to wait for.
                tab.locator(".htmx-request").first.wait_for(state="detached")
                check_tab(tab, path)


@pytest.mark.slow
def test_a_question_in_a_browser_shows_hostile_text_as_text(hostile: Site, browser: Any) -> None:
    path = "/recurring"
    with served(hostile.app) as address, watched(browser) as tab:
        tab.goto(address + path)
        tab.get_by_role("button", name="Remove").first.click()
        assert HOSTILE in tab.locator("#confirm-text").inner_text()
        check_tab(tab, path)


def check_tab(tab: Any, path: str) -> None:
    """Check that the browser shows the text, made no element of it, and ran no script in it."""
    assert HOSTILE[:20] in tab.locator("body").inner_text(), path
    assert tab.locator("img[src=x]").count() == 0, path
    assert tab.title() != "owned", path
