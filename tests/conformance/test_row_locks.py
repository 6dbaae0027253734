"""A processor that leaves its own row locked in an open transaction."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine, update

from delaytasks import DelayTask
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.storage import database
from delaytasks.storage.store import Store
from tests.recording import RunnerHarness

pytestmark = pytest.mark.slow


def test_a_row_that_its_processor_left_locked_is_named_and_delays_no_other_row(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_FOR_S", 0)
    bench = RunnerHarness(store, lease_s=2, chunk_time_budget_s=0.5)
    engine = create_engine(store.database.url)
    connection = engine.connect()
    t = store.schema.tasks

    def lock(body: Any, task: DelayTask) -> None:
        connection.execute(update(t).where(t.c.id == task.id).values(lapses=0))

    bench.registry.processor("lock")(lock)
    locking = bench.schedule("lock")
    # SQLite locks the whole database, so tasks that no worker can settle run again.
    others = (
        [bench.schedule() for _ in range(4)]
        if store.database.url.get_backend_name() != "sqlite"
        else []
    )
    try:
        with pytest.raises(StoreUnavailableError):
            bench.run(locking, *others)
        assert bench.statuses(others) == ["DONE"] * len(others)
    finally:
        connection.rollback()
        engine.dispose()
    [told] = bench.named("task.row_locked")
    assert (told["id"], told["tag"]) == (locking.id, "lock")
    assert "commit or roll back before the processor returns" in told["remedy"]
    assert bench.named("store.down") == []
    assert bench.statuses([locking]) == ["RUNNING"], "its lease ends, and it runs again"
