"""A viewer sees at the top of a page which fault real workers have."""

from __future__ import annotations

import re
from typing import Any

import pytest

from delaytasks.console.viewers import Role
from tests.services import Services
from tests.ui.chromium import watched
from tests.ui.console_site import served
from tests.ui.fault_pictures import FAULTS, TALLEST, opened
from tests.ui.test_console_in_a_browser import MODES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FAULTS)
def test_the_top_of_the_page_names_the_fault(browser: Any, services: Services, name: str) -> None:
    fault = FAULTS[name]
    with opened(services) as shop, served(shop.site.app) as address:
        fault.cause(shop)
        shop.site.client(Role.OPERATE)
        with watched(browser, **MODES["light"]) as page:
            for shown in fault.pages.values():
                page.goto(address + shown.path)
                headline = page.locator("h1")
                assert re.search(shown.headline, headline.inner_text()), headline.inner_text()
                sentence = page.get_by_text(re.compile(shown.sentence)).first
                sentence.wait_for()
                box = sentence.bounding_box()
                assert box["y"] + box["height"] < TALLEST, "it is seen without scrolling"
