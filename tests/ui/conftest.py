"""A console with tasks in all states, and a browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ui.chromium import chromium, find_chromium
from tests.ui.console_site import Site, fill, make_delays, served


def _site(folder: Path) -> Site:
    site = Site(make_delays(f"sqlite:///{folder / 'console.sqlite3'}"))
    fill(site.delays)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A console that the tests of a module share."""
    made = _site(tmp_path_factory.mktemp("console"))
    yield made
    made.close()


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """A console whose tasks the test changes."""
    made = _site(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    """The address at which the shared console is served."""
    with served(site.app) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    pytest.importorskip("playwright.sync_api")
    program = find_chromium()
    if program is None:
        reason = "needs chromium: there is none on the PATH"
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with chromium(program) as started:
        yield started
