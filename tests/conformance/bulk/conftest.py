"""Fixtures of the suites of bulk operations."""

from __future__ import annotations

import pytest

from delaytasks.operations import bulk_calls as engine_bulk
from delaytasks.storage import bulk_moves as store_bulk


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps and windows only a few rows long."""
    monkeypatch.setattr(engine_bulk, "BULK_ROWS", 3)
    monkeypatch.setattr(engine_bulk, "BUSY_S", 0.2)
    monkeypatch.setattr(store_bulk, "WINDOW", 4)
