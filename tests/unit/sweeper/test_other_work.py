"""A sweep is alone, expires workers, drains queues and purges."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from delaytasks import Status
from delaytasks.core.interfaces import Entry
from delaytasks.maintenance import sweeper
from tests.conftest import open_store
from tests.recording import RecordingTimer, counted
from tests.unit.sweeper.sweeper_harness import Make, SweeperHarness


def test_partitions_share_the_rows_and_the_first_does_the_other_work(make: Make) -> None:
    field = make(sweep_partitions=3)
    ids = [field.row(5) for _ in range(60)]
    lapsed = field.row(-60, Status.RUNNING, lease_until=field.clock.now() - timedelta(seconds=1))
    field.serve("w1", "default")
    field.row(-60)
    shares = [field.sweep(sweep_partition) for sweep_partition in (1, 2)]
    assert field.status(lapsed) is Status.RUNNING
    assert field.timer.requested_drains == []
    shares.insert(0, field.sweep(0))
    assert field.status(lapsed) is Status.NOT_COMPLETE
    assert len(field.timer.requested_drains) == 1
    assert sorted(id for share in shares for id in share) == ids, "each row is in one partition"
    assert min(len(share) for share in shares) >= 10
    assert [field.sweep(sweep_partition) for sweep_partition in range(3)] == [[], [], []]


# -- workers that died ---------------------------------------------------------------------------


def test_rows_that_a_dead_worker_held_are_armed_again(field: SweeperHarness) -> None:
    field.serve("w1", "default")
    field.serve("w2", "default")
    ids = [field.row(5), field.row(20)]
    assert field.sweep() == ids
    field.silence("w1")
    assert field.sweep() == ids
    assert [fields["worker"] for name, fields in field.told if name == "worker.lost"] == ["w1"]
    assert field.sweep() == [], "it is told once"


def test_a_worker_that_was_silent_briefly_is_not_expired(field: SweeperHarness) -> None:
    field.serve("w1", "default")
    w = field.store.schema.workers
    with field.store.database.begin() as connection:
        silent_s = field.settings.sweep_s * 2
        connection.execute(
            update(w).values(seen_at=field.clock.now() - timedelta(seconds=silent_s))
        )
    field.sweep()
    assert field.count("worker.lost") == 0


def test_a_worker_that_dies_while_a_partition_is_swept_is_not_forgotten(make: Make) -> None:
    """The sweep began before the worker expired, so it must not mark all rows as armed."""
    field = make(sweep_partitions=2)
    field.serve("w1", "default")
    ids = [field.row(15 + n / 100) for n in range(40)]
    mine = [*field.sweep(0), *field.sweep(1)]
    assert sorted(mine) == ids

    class Meanwhile(RecordingTimer):
        def arm(self, entries: Iterable[Entry]) -> bool:
            field.silence("w1")
            field.sweep(0)
            return super().arm(entries)

    field.row(29.9)
    field.row(29.9)
    field.near_until(29)
    field.sweep(1, timer=Meanwhile())
    again = field.sweep(1)
    assert set(ids) <= {*field.timer.ids[len(mine) :], *again}


# -- overdue rows --------------------------------------------------------------------------------


def test_overdue_rows_cause_a_few_drain_messages_for_served_queues(field: SweeperHarness) -> None:
    for _ in range(50):
        field.row(-60, queue="mail", priority=3)
        field.row(-60, queue="mail", priority=5)
    field.row(-60, queue="nobody")
    field.row(-0.2)  # within the grace period
    field.serve("w1", "default", "mail")
    field.serve("w2", "mail")
    field.sweep()
    [(queue, priorities, messages)] = field.timer.requested_drains
    assert (queue, sorted(priorities), messages) == (
        "mail",
        [3, 5],
        2 * field.settings.drain_messages,
    )
    assert [fields["queue"] for name, fields in field.told if name == "queue.unserved"] == [
        "nobody"
    ]


def test_old_finished_rows_are_deleted_only_if_configured(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "PURGE_ROWS", 10)
    for changes, left in (({}, 28), ({"purge_after_s": 3600}, 3)):
        field = make(**changes)
        old = field.clock.now() - timedelta(hours=2)
        for _ in range(25):
            field.row(-7200, Status.DONE, update_time=old)
        field.row(-7200, update_time=old)
        field.row(
            -7200,
            Status.RUNNING,
            update_time=old,
            lease_until=field.clock.now() + timedelta(hours=1),
        )
        field.row(-7200, Status.FAILED)
        field.sweep()
        assert sum(counted(field.store).values()) == left
        assert field.count("task.purged") == 28 - left


def test_workers_without_a_broker_cause_no_drain_messages(tmp_path: Path) -> None:
    field = SweeperHarness(f"sqlite:///{tmp_path / 'here.sqlite3'}")
    field.store.workers.report("drainer", ["*"], "drain/prefork", 2, 0)
    field.store.workers.report("direct", ["default"], "direct/prefork", 2, 0)
    field.row(-60)
    field.sweep()
    assert "queue.unserved" in [name for name, _ in field.told]
    field.store.workers.report("worker", ["default"], "prefork", 2, 0)
    field.sweep()
    [messages] = [fields["messages"] for name, fields in field.told if name == "sweep.drain"]
    assert messages == field.settings.drain_messages
    field.store.close()


def test_sweeps_without_a_broker_do_not_replace_sweeps_with_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'here.sqlite3'}"
    field, direct = SweeperHarness(url), open_store(url, timer="direct")
    assert direct.sweeps.begin_sweep(0, 1, 4) is not None
    assert field.store.sweeps.stale_sweep_partitions(1, 10) == [0]
    assert field.store.sweeps.begin_sweep(0, 1, 4) is not None
    assert (
        field.store.sweeps.stale_sweep_partitions(1, 10),
        direct.sweeps.stale_sweep_partitions(1, 10),
    ) == ([], [])
    assert direct.sweeps.begin_sweep(0, 1, 4) is None
    direct.close()
    field.store.close()


def test_abandoned_rows_are_recovered_in_any_number(
    field: SweeperHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "RECOVER_ROWS", 10)
    over, lasting = (
        field.clock.now() - timedelta(seconds=1),
        field.clock.now() + timedelta(seconds=60),
    )
    lapsed = [field.row(-60, Status.RUNNING, lease_until=over) for _ in range(25)]
    last = field.row(
        -60, Status.RUNNING, lease_until=over, lapses=field.settings.max_lost_leases - 1
    )
    runs = field.row(-60, Status.RUNNING, lease_until=lasting)
    field.sweep()
    assert {field.status(id) for id in lapsed} == {Status.NOT_COMPLETE}
    assert (field.status(last), field.status(runs)) == (Status.FAILED, Status.RUNNING)
    assert field.count("task.recovered") == 26
