"""A Celery version that is too old or untested is reported, with the versions that work."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import celery
import pytest
from celery import signals

from delaytasks.attachment import NEWEST_TESTED_CELERY, OLDEST_CELERY
from delaytasks.core.errors import ConfigError
from tests.celery_shapes import Records
from tests.recording import delays_on

ROOT = Path(__file__).parents[2]


def test_a_celery_that_is_too_old_is_named_when_an_app_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(celery, "VERSION", (5, 4, 0, "", ""))
    monkeypatch.setattr(celery, "__version__", "5.4.0")
    oldest = ".".join(map(str, OLDEST_CELERY))
    with pytest.raises(
        ConfigError,
        match=rf"Celery 5\.4\.0 is installed.*needs Celery {re.escape(oldest)} or newer",
    ):
        delays_on("sqlite://")


@pytest.mark.parametrize(
    "version", [(*OLDEST_CELERY, 0), (*OLDEST_CELERY, 3), (6, 0, 0), celery.VERSION]
)
def test_the_versions_from_the_oldest_one_on_are_taken(
    version: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(celery, "VERSION", version)
    delays_on("sqlite://").close()


def test_the_package_asks_for_the_same_version() -> None:
    asked = re.search(r'"celery\[redis\]>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert asked is not None
    assert asked[1] == ".".join(map(str, OLDEST_CELERY))


def warnings_at_start(version: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(celery, "VERSION", version)
    monkeypatch.setattr(celery, "__version__", ".".join(map(str, version)))
    handler = Records()
    logger = logging.getLogger("delaytasks.attachment")
    logger.addHandler(handler)
    try:
        delays_on("sqlite://").close()
        signals.celeryd_after_setup.send(sender="worker", instance=None, conf=None)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in handler.records]


@pytest.mark.parametrize("newer", [(0, 1), (1, 0)])
def test_a_worker_warns_of_a_celery_that_is_newer_than_the_newest_tested_one(
    newer: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = NEWEST_TESTED_CELERY
    version = (major + newer[0], minor + newer[1], 3)
    [warning] = warnings_at_start(version, monkeypatch)
    assert f"Celery {'.'.join(map(str, version))} is installed" in warning
    assert f"pip install 'celery~={major}.{minor}.0'" in warning


@pytest.mark.parametrize("version", [(*OLDEST_CELERY, 0), (*NEWEST_TESTED_CELERY, 9)])
def test_a_worker_does_not_warn_of_a_celery_in_the_tested_range(
    version: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warnings_at_start(version, monkeypatch) == []


def test_the_docs_state_the_tested_range() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    stated = [".".join(map(str, version)) for version in (OLDEST_CELERY, NEWEST_TESTED_CELERY)]
    assert f"| Celery | {' to '.join(stated)} |" in page
