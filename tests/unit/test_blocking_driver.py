"""A worker whose pool has greenlets warns of a driver that stops all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from delaytasks.worker.bootsteps import warn_of_blocking_driver


@pytest.mark.parametrize(
    ("is_green", "driver", "warns"),
    [
        (True, "postgresql+psycopg2", True),
        (True, "postgresql+psycopg", False),
        (True, "mysql+pymysql", False),
        (False, "postgresql+psycopg2", False),
    ],
)
def test_greenlets_and_psycopg2_give_a_warning(
    caplog: pytest.LogCaptureFixture, is_green: bool, driver: str, warns: bool
) -> None:
    warn_of_blocking_driver(SimpleNamespace(is_green=is_green), driver)
    assert ("begin delaytasks_database_url with postgresql+psycopg://" in caplog.text) is warns
