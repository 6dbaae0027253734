"""An installed Celery that is too old is named, with the versions that work."""

from __future__ import annotations

import re
from pathlib import Path

import celery
import pytest

from delaytasks.core.errors import ConfigError
from delaytasks.worker.celery_compat.celery_version import OLDEST_CELERY
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
