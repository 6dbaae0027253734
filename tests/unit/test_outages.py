"""Which databases a worker says are away: those that do not answer, not those that refuse."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.worker import database_outages as outages_module
from delaytasks.worker.database_outages import SILENT_S, Outages
from delaytasks.worker.policy_loop import policy_loop


@pytest.mark.parametrize(
    ("error", "is_down"),
    [
        (StoreError("permission denied"), False),
        (StoreUnavailableError("stayed busy", is_locked=True), False),
        (StoreUnavailableError("connection refused"), True),
    ],
)
def test_a_database_that_refuses_is_not_away(
    monkeypatch: pytest.MonkeyPatch, error: StoreError, is_down: bool
) -> None:
    now = [1000.0]
    monkeypatch.setattr(outages_module, "monotonic", lambda: now[0])
    events, told = Events(), list[str]()
    events.subscribe(lambda name, fields: told.append(name))
    outages = Outages(events)

    def refresh() -> Any:
        raise error

    cache = SimpleNamespace(known=SimpleNamespace(stamp=None), refresh=refresh)
    shard: Any = SimpleNamespace(policies=cache, number=0, named=str, close=None)
    delays: Any = SimpleNamespace(events=events)
    loop = policy_loop(delays, shard, outages)
    for _ in range(3):
        with suppress(StoreError):
            loop._turn()
        now[0] += SILENT_S + 1
        outages.look()
    assert told == (["store.down"] if is_down else [])
