"""The versions that are tested are the ones that may be installed."""

from __future__ import annotations

import re

from tests.running import ROOT


def pinned() -> dict[str, str]:
    lines = (ROOT / "tests/oldest.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_oldest_celery_that_may_be_installed_is_tested() -> None:
    [oldest] = re.findall(r'"celery\[redis\]>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned()["celery"] == f"{oldest}.0"


def test_the_versions_in_the_docs_include_the_oldest_ones_that_are_tested() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    for package in ("Celery", "kombu", "billiard"):
        [tested] = re.findall(rf"^\| {package} \|.*\| (.*) \|$", page, re.MULTILINE)
        assert tested.split(", ")[0] == pinned()[package.lower()]
