"""Test Django's admin on each database."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.shops import new_database
from tests.running import ROOT

pytestmark = pytest.mark.slow

pytest.importorskip("django")


@pytest.fixture
def fresh_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Create a database that only this test uses."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shop.sqlite3'}"
        return
    url, drop = new_database(request.getfixturevalue(f"{request.param}_url"))
    yield url
    drop()


@pytest.mark.parametrize(
    "fresh_url",
    ["postgresql", "mysql", pytest.param("sqlite", marks=pytest.mark.quick)],
    indirect=True,
)
def test_the_tests_of_the_admin_pass(fresh_url: str) -> None:
    # The plugin of pytest-django would refuse to use a database.
    plugins = [
        "no:django",
        "no:xdist",
        "no:cacheprovider",
        "tests.integration.django_admin_settings",
    ]
    options = [option for plugin in plugins for option in ("-p", plugin)]
    tests = "tests/integration/django_admin_tests.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, tests],
        cwd=ROOT,
        env={**os.environ, "ADMIN_DATABASE_URL": fresh_url},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
