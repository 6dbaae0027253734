"""The statements of sweeps find recurring schedules by indexes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import insert

from delaytasks.recurrence.creation import Creation, RecurringTable
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.conformance.query_plans import assert_no_scan, plans
from tests.conftest import open_store
from tests.recording import RecordingTimer, delays_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def many(database_url: str) -> Iterator[tuple[Store, Creation]]:
    """Yield 5,000 schedules, of which some are due, and a sweeper."""
    store = open_store(database_url, table_prefix="plan_")
    delays = delays_on(database_url, table_prefix="plan_")
    runtime = runtime_of(delays)
    table, now = RecurringTable(store.database, store.schema), store.tasks.now()
    made = delays.recurring.set("first", "report", every="1h", overlap="skip")
    rows = [
        table.values(replace(made, name=f"r{n}", id=n, next_at=now + timedelta(seconds=n)))
        for n in range(5000)
    ]
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.recurring), rows)
        keys = [{"tag": "other", "task_key": f"k{n}", "task_id": n} for n in range(5000)]
        connection.execute(insert(store.schema.keys), keys)
        if store.database.url.get_backend_name() != "sqlite":
            is_pg = store.database.url.get_backend_name() == "postgresql"
            for each in (store.schema.recurring, store.schema.keys):
                connection.exec_driver_sql(f"ANALYZE {'' if is_pg else 'TABLE '}{each.name}")
    events = runtime_of(delays).events
    yield (
        store,
        Creation(delays.settings, table, runtime.new_id, runtime.clock, RecordingTimer(), events),
    )
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    delays.close()
    store.close()


def test_no_statement_of_a_sweep_reads_all_schedules(many: tuple[Store, Creation]) -> None:
    store, creation = many
    shown = plans(store, lambda: store.due_schedules.exist(45))
    shown += plans(store, lambda: creation.create(lambda: None))
    assert "plan_" in shown
    assert_no_scan(shown)
