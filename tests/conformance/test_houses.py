"""House numbers: sweeps side by side share one table, on each database."""

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
    """The ids of rows that are due within the horizon; half of the ids are ours, half are a database's."""
    now, make_id = store.tasks.now(), IdMaker(wall_ms)
    ids = [make_id() if n % 2 else 1000 + n // 2 for n in range(count)]
    due = [now + timedelta(seconds=10 + n / count) for n in range(count)]
    store.tasks.insert_many(
        [DelayTask(id, "mail", "{}", at, create_time=now) for id, at in zip(ids, due, strict=True)]
    )
    return sorted(ids)


def sweeper(store: Store, houses: int) -> tuple[Sweeper, RecordingTimer]:
    settings: Any = settings_for("sqlite://", houses=houses)
    timer = RecordingTimer()
    return Sweeper(
        settings, store.sweeps, store.workers, Clock(store.tasks.now), timer, Events()
    ), timer


def let_pass(store: Store) -> None:
    s = store.schema.sweeps
    with store.database.begin() as connection:
        connection.execute(update(s).values(swept_at=store.tasks.now() - timedelta(seconds=60)))


def sweep_side_by_side(store: Store, houses: int) -> list[RecordingTimer]:
    """Two workers for each house, all at once; what was armed in each house."""
    start = threading.Barrier(2 * houses)
    pairs = [[sweeper(store, houses) for _ in range(houses)] for _ in range(2)]

    def sweep(worker: int, house: int) -> bool:
        start.wait(10)
        return pairs[worker][house][0].sweep(house)

    with ThreadPoolExecutor(2 * houses) as pool:
        futures = {
            (worker, house): pool.submit(sweep, worker, house)
            for worker in range(2)
            for house in range(houses)
        }
        did = {place: future.result(30) for place, future in futures.items()}
    assert [did[0, house] + did[1, house] for house in range(houses)] == [1] * houses, (
        "one of the two sweeps a house"
    )
    return [pairs[0 if did[0, house] else 1][house][1] for house in range(houses)]


@pytest.mark.parametrize("houses", [1, 2, 4])
def test_sweeps_side_by_side_arm_each_row_once_and_share_them_evenly(
    store: Store, houses: int
) -> None:
    ids = near_rows(store, 2000)
    shares = [timer.ids for timer in sweep_side_by_side(store, houses)]
    assert sorted(id for share in shares for id in share) == ids
    assert min(map(len, shares)) > 0.8 * len(ids) / houses
    let_pass(store)
    assert [timer.ids for timer in sweep_side_by_side(store, houses)] == [[]] * houses, (
        "and not again"
    )


def test_no_row_is_missed_when_the_number_of_houses_changes(store: Store) -> None:
    ids = near_rows(store, 200)
    for houses in (2, 4, 1):
        assert sorted(id for timer in sweep_side_by_side(store, houses) for id in timer.ids) == ids
