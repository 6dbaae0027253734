"""Sweep partitions: concurrent sweeps share one table, on each database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks.core.clock import Clock, wall_ms
from delaytasks.core.events import Events
from delaytasks.core.ids import IdMaker
from delaytasks.core.task import DelayTask
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.storage.store import Store
from tests.conftest import settings_for
from tests.recording import RecordingTimer


def near_rows(store: Store, count: int) -> list[int]:
    """Insert rows that are due within the horizon, and return their ids.

    We make half of the ids, and the other half look like ids of a database.
    """
    now, make_id = store.tasks.now(), IdMaker(wall_ms)
    ids = [make_id() if n % 2 else 1000 + n // 2 for n in range(count)]
    due = [now + timedelta(seconds=10 + n / count) for n in range(count)]
    store.tasks.insert_many(
        [DelayTask(id, "mail", "{}", at, create_time=now) for id, at in zip(ids, due, strict=True)]
    )
    return sorted(ids)


def sweeper(store: Store, sweep_partitions: int) -> tuple[Sweeper, RecordingTimer]:
    settings: Any = settings_for("sqlite://", sweep_partitions=sweep_partitions)
    timer = RecordingTimer()
    return Sweeper(
        settings, store.sweeps, store.workers, Clock(store.tasks.now), timer, Events()
    ), timer


def let_pass(store: Store) -> None:
    s = store.schema.sweeps
    with store.database.begin() as connection:
        connection.execute(update(s).values(swept_at=store.tasks.now() - timedelta(seconds=60)))


def sweep_concurrently(store: Store, sweep_partitions: int) -> list[RecordingTimer]:
    """Run two workers for each sweep partition simultaneously, and return the timer of each
    partition."""
    start = threading.Barrier(2 * sweep_partitions)
    pairs = [[sweeper(store, sweep_partitions) for _ in range(sweep_partitions)] for _ in range(2)]

    def sweep(worker: int, sweep_partition: int) -> bool:
        start.wait(10)
        return pairs[worker][sweep_partition][0].sweep(sweep_partition)

    with ThreadPoolExecutor(2 * sweep_partitions) as pool:
        futures = {
            (worker, sweep_partition): pool.submit(sweep, worker, sweep_partition)
            for worker in range(2)
            for sweep_partition in range(sweep_partitions)
        }
        did = {place: future.result(30) for place, future in futures.items()}
    assert [
        did[0, sweep_partition] + did[1, sweep_partition]
        for sweep_partition in range(sweep_partitions)
    ] == [1] * sweep_partitions, "one of the two sweeps a sweep_partition"
    return [
        pairs[0 if did[0, sweep_partition] else 1][sweep_partition][1]
        for sweep_partition in range(sweep_partitions)
    ]


@pytest.mark.parametrize("sweep_partitions", [1, 2, 4])
def test_concurrent_sweeps_arm_each_row_once_and_share_the_rows_evenly(
    store: Store, sweep_partitions: int
) -> None:
    ids = near_rows(store, 2000)
    shares = [timer.ids for timer in sweep_concurrently(store, sweep_partitions)]
    assert sorted(id for share in shares for id in share) == ids
    assert min(map(len, shares)) > 0.8 * len(ids) / sweep_partitions
    let_pass(store)
    assert [timer.ids for timer in sweep_concurrently(store, sweep_partitions)] == [
        []
    ] * sweep_partitions, "and not again"


def test_no_row_is_missed_when_the_number_of_sweep_partitions_changes(store: Store) -> None:
    ids = near_rows(store, 200)
    for sweep_partitions in (2, 4, 1):
        assert (
            sorted(id for timer in sweep_concurrently(store, sweep_partitions) for id in timer.ids)
            == ids
        )
