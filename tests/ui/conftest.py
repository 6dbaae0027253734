"""A console with tasks in all states, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import give_up
from tests.ui.chromium import MODES, chromium, find_chromium, watched
from tests.ui.console_site import Site, fill, make_delays, report_workers, served


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with tasks in all states, which each console copies."""
    file = tmp_path_factory.mktemp("filled") / "console.sqlite3"
    delays = make_delays(f"sqlite:///{file}")
    fill(delays)
    delays.close()
    return file


def copied(filled: Path, folder: Path) -> Iterator[Site]:
    for file in filled.parent.glob(f"{filled.name}*"):  # also what SQLite keeps beside the database
        shutil.copy(file, folder)
    with closing(Site(make_delays(f"sqlite:///{folder / filled.name}", is_new=False))) as made:
        report_workers(made.delays)  # the last report may be old
        yield made


@pytest.fixture(scope="module")
def site(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A console that the tests of a module share."""
    yield from copied(filled, tmp_path_factory.mktemp("console"))


@pytest.fixture
def own_site(filled: Path, tmp_path: Path) -> Iterator[Site]:
    """A console whose tasks the test changes."""
    yield from copied(filled, tmp_path)


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
        give_up("needs chromium: there is none on the PATH")
    with chromium(program) as started:
        yield started


@pytest.fixture(params=MODES)
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """A tab in light, dark or phone width, in which errors and foreign requests fail the test."""
    with watched(browser, **MODES[request.param], reduced_motion="reduce") as opened:
        yield opened
