"""The tested versions are the versions that may be installed."""

from __future__ import annotations

import re

import pytest
from celery import Celery

from delaytasks.cli.setup import broker_url
from tests.running import ROOT

#: Celery requires these libraries, and each of its releases limits their versions.
OF_CELERY = {"kombu", "billiard", "amqp", "redis"}
FRAMEWORKS = {
    "celery", "django", "flask", "flask-sqlalchemy", "fastapi", "starlette", "sentry-sdk",
    "opentelemetry-api", "sqlalchemy", "django-tasks", "litestar", "quart", "pytest-django",
    "freezegun", "time-machine",
}  # fmt: skip


def pinned() -> dict[str, str]:
    lines = (ROOT / "tests/oldest.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_oldest_versions_that_may_be_installed_are_tested() -> None:
    requirements = (ROOT / "pyproject.toml").read_text()
    for package, version in pinned().items():
        found = re.findall(rf'"{package}(?:\[\w+\])?>=([0-9.]+)', requirements)
        if package in OF_CELERY:
            assert found == []
        else:
            assert {three_parts(oldest) for oldest in found} == {version}, package
    assert pinned().keys() >= FRAMEWORKS


def three_parts(version: str) -> str:
    return version if version.count(".") > 1 else f"{version}.0"


def test_the_versions_in_the_docs_include_the_oldest_ones_that_are_tested() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    for package in FRAMEWORKS | {"kombu", "billiard"}:
        [tested] = re.findall(rf"(?mi)^\| {package} \|.*\| (.*) \|$", page)
        assert tested.split(", ")[0] == pinned()[package]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://me:se;cr@et@host//", "amqp://me:***@host//"),
        (
            "amqp://me:secret@one//;amqp://me:secret@two//",
            "amqp://me:***@one//;amqp://me:***@two//",
        ),
        (
            "sentinel://:secret@one:26379;sentinel://:secret@two:26379/0",
            "sentinel://:***@one:26379;sentinel://:***@two:26379/0",
        ),
        ("redis://host/0", "redis://host/0"),
    ],
)
def test_the_broker_is_shown_without_its_passwords(url: str, shown: str) -> None:
    app = Celery(set_as_current=False)
    app.conf.broker_write_url = url
    assert broker_url(app) == shown
