"""How long the metrics of the databases are kept before they are read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.metrics import snapshot
from delaytasks.metrics.snapshot import MAX_REST_S, REST_S, DatabaseMetrics
from delaytasks.operations.state import read_tables
from delaytasks.runtime import runtime_of
from tests.recording import delays_on
from tests.unit.manual_monotonic import ManualMonotonic


def rest_after_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any], took_s: float
) -> float:
    """Return the whole seconds for which the values of a reading of `took_s` are kept."""
    time, reads = ManualMonotonic(), list[float]()

    def slow(*arguments: Any) -> Any:
        reads.append(time.at)
        time.at += took_s
        return read(*arguments)

    monkeypatch.setattr(snapshot, "monotonic", time)
    monkeypatch.setattr(snapshot, "read_tables", slow)
    delays = delays_on(f"sqlite:///{tmp_path / 'a.sqlite3'}")
    with runtime_of(delays).store.database.begin() as connection:
        runtime_of(delays).store.schema.metadata.create_all(connection)
    source = DatabaseMetrics(runtime_of(delays))
    source.families()
    read_at = time.at
    while len(reads) == 1:
        time.at += 1
        source.families()
    delays.close()
    return reads[1] - read_at


def refuse_reading(*_: Any) -> None:
    raise StoreUnavailableError("down")


def test_a_database_that_was_down_is_read_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rest_after_reading(tmp_path, monkeypatch, refuse_reading, 5) == REST_S


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.1, REST_S), (1, 20), (5, MAX_REST_S)])
def test_slow_queries_are_repeated_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, rest_s: float
) -> None:
    read = read_tables
    assert rest_after_reading(tmp_path, monkeypatch, read, took_s) == rest_s
