"""Rows of the worker table that another program wrote."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import insert, update

from delaytasks import DelayTasks
from delaytasks.cli.stats_document import worker_json
from delaytasks.core.workers import RegisteredWorker
from delaytasks.operations.state import read_tables
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from delaytasks.worker.worker_shares import WorkerShares
from tests.recording import RecordingTimer, record_sweeps

pytestmark = pytest.mark.slow

STRANGE = [
    "x",
    "5",
    "null",
    '"default"',
    '{"default": 1}',
    '[["x"]]',
    "[null, 5]",
    '["default", 5]',
    "[" * 100_000,
    "",
]
#: These names are strings, but no database can look them up.
BAD_NAMES = ['["\\u0000", "default"]', '["\\ud800", "default"]', f'["{"x" * 5000}", "default"]']
FAR = datetime(2099, 1, 1, tzinfo=timezone.utc)


def add_worker(store: Store, name: str, **values: Any) -> None:
    store.workers.report(name, ["default"], "prefork", 2, 0, ["mail"])
    w = store.schema.workers
    with store.database.begin() as connection:
        connection.execute(update(w).where(w.c.name == name).values(values))


def add_overdue_row(store: Store, queue: str = "default") -> None:
    past = datetime(2020, 1, 1, tzinfo=timezone.utc)
    row = {"tag": "mail", "message_body": "{}", "expected_time": past, "queue": queue}
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(row))


def sweep(delays: DelayTasks) -> list[str]:
    """Sweep, and return the stages that failed."""
    failed: list[str] = []
    delays.events.subscribe(
        lambda name, fields: failed.append(fields["error"]) if name == "loop.failed" else None
    )
    runtime_of(delays).sweeper.sweep()
    return failed


def registered(store: Store, delays: DelayTasks) -> list[RegisteredWorker]:
    return store.workers.registered(store.tasks.now(), delays.settings.silent_s)


def workers_of_stats(delays: DelayTasks) -> list[dict[str, Any]]:
    state = read_tables(runtime_of(delays).store, delays.settings)
    return [worker_json(state.now, worker) for worker in state.workers]


@pytest.mark.parametrize("queues", STRANGE, ids=lambda text: text[:20])
def test_invalid_queues_of_a_worker_do_not_keep_overdue_rows_from_other_workers(
    store: Store, delays: DelayTasks, timer: RecordingTimer, queues: str
) -> None:
    store.workers.report("good", ["default"], "prefork", 2, 0)
    add_worker(store, "strange", queues=queues)
    add_overdue_row(store)
    record_sweeps(runtime_of(delays), timer)
    assert sweep(delays) == []
    assert [queue for queue, _, _ in timer.requested_drains] == ["default"]
    assert [worker["queues"] for worker in workers_of_stats(delays)] == [["default"], []]
    assert [w.queues for w in registered(store, delays)] == [["default"], []]


@pytest.mark.parametrize("queues", BAD_NAMES, ids=["NUL", "surrogate", "long"])
def test_a_queue_name_that_cannot_be_stored_is_ignored(
    store: Store, delays: DelayTasks, timer: RecordingTimer, queues: str
) -> None:
    add_worker(store, "strange", queues=queues)
    add_overdue_row(store)
    record_sweeps(runtime_of(delays), timer)
    assert sweep(delays) == []
    assert [queue for queue, _, _ in timer.requested_drains] == ["default"]


def test_values_of_other_types_do_not_stop_the_workers(store: Store, delays: DelayTasks) -> None:
    if store.database.url.get_backend_name() != "sqlite":
        pytest.skip("only SQLite stores values of any type")
    store.workers.report("strange", ["default"], "prefork", 2, 0)
    with store.database.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE s_yb_delay_worker SET queues = x'00', pool = x'00', concurrency = 'x', "
            "clock_offset_us = 'x', tags = x'00', busy = 'x', version = x'00'"
        )
    add_overdue_row(store)
    assert sweep(delays) == []
    [worker] = workers_of_stats(delays)
    assert (worker["queues"], worker["concurrency"], worker["tags"]) == ([], 0, None)
    assert (worker["busy"], worker["version"]) == (None, None)


def test_a_worker_that_was_seen_in_the_future_is_lost(store: Store, delays: DelayTasks) -> None:
    store.workers.report("good", ["default"], "prefork", 2, 0)
    add_worker(store, "strange", seen_at=FAR, pool="direct/prefork")
    assert [w["is_alive"] for w in workers_of_stats(delays)] == [True, False]
    assert [worker.is_alive for worker in registered(store, delays)] == [True, False]
    members = WorkerShares("me")
    members.learn(store.workers.all(), store.tasks.now(), delays.settings.sweep_s)
    assert members._workers == []
    assert store.workers.expire(60) == ["strange"]
    assert [worker["name"] for worker in store.workers.all()] == ["good"]
