"""A worker that was frozen renews too late: its processors learn that the leases have ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import Connection, update

from delaytasks import DelayTask, Status
from delaytasks.core.errors import LeaseLostError
from delaytasks.execution import executor as run_module
from delaytasks.storage.store import Store
from delaytasks.worker import lease_keeper as keeper_module
from delaytasks.worker.lease_keeper import LeaseKeeper
from delaytasks.worker.shared_memory import Renewals
from tests.conformance.store_rows import has_row_locks, lapse_all
from tests.recording import RunnerHarness
from tests.waiting import wait_until

pytestmark = pytest.mark.quick

LEASE_S = 60.0


class FrozenWorker:
    """A runner, and the main process that renews its leases, with a monotonic clock that is set."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100_000.0
        for module in (run_module, keeper_module):
            monkeypatch.setattr(module, "monotonic", lambda: self.now_s)
        self.renewals = Renewals()
        self.bench = bench = RunnerHarness(store, lease_s=LEASE_S, chunk_time_budget_s=1)
        bench.runner = bench.make_runner(last_renewal=lambda: self.renewals.last())
        runtime: Any = SimpleNamespace(
            store=store,
            clock=bench.clock,
            settings=bench.settings,
            events=bench.events,
            registry=bench.registry,
        )
        processes: Any = SimpleNamespace(name=lambda pid: "worker-1", renewals=self.renewals)
        chunk_began_us = bench.clock.now_us() - int(LEASE_S * 1e6)
        self.dispatcher = dispatcher = SimpleNamespace(running=lambda: ([chunk_began_us], {}))
        pool = SimpleNamespace(info={"processes": [os.getpid()]})
        self._keeper = LeaseKeeper(
            runtime,
            processes,
            cast("Any", dispatcher),
            pool,
            None,
        )

    def renew(self) -> None:
        """Let the main process renew the leases once."""
        self.run_keeper(lambda: self.renewals.last()[0] == self.now_s)

    def run_keeper(self, until: Callable[[], bool]) -> None:
        self._keeper.loop.start()
        try:
            wait_until(until, 10, "the renewal")
        finally:
            self._keeper.loop.stop()


@pytest.fixture
def worker(store: Store, monkeypatch: pytest.MonkeyPatch) -> FrozenWorker:
    return FrozenWorker(store, monkeypatch)


def test_a_lease_that_ended_before_its_renewal_is_reported_as_lost(worker: FrozenWorker) -> None:
    bench = worker.bench
    reported: list[str] = []

    @bench.registry.processor("long")
    def work(body: object, task: DelayTask) -> None:
        worker.now_s += LEASE_S / 2
        worker.renew()
        task.check_lease()
        worker.now_s += LEASE_S + 1  # all processes of the worker are frozen
        assert lapse_all(bench.store, [task]) == 1, "another worker recovers the row"
        worker.renew()
        with pytest.raises(LeaseLostError, match="has ended"):
            task.check_lease()
        reported.append("lost")
        task.check_lease()

    task = bench.schedule("long")
    bench.run(task)
    assert reported == ["lost"]
    now = bench.now(task)
    assert (now.status, now.lapses) == (Status.NOT_COMPLETE, 1)
    assert [fields["id"] for fields in bench.named("task.lease_lost")] == [task.id]


def test_a_run_that_began_after_an_idle_time_has_its_lease(worker: FrozenWorker) -> None:
    bench = worker.bench
    ended: list[int] = []

    @bench.registry.processor("long")
    def work(body: object, task: DelayTask) -> None:
        for _ in range(3):
            worker.now_s += LEASE_S / 2
            worker.renew()
            task.check_lease()
        ended.append(task.id)

    for _ in range(2):
        worker.now_s += 10 * LEASE_S  # no row runs, so no lease is renewed
        bench.run(bench.schedule("long"))
    assert len(ended) == 2


def test_a_row_that_was_locked_during_a_renewal_is_renewed_a_second_later(
    worker: FrozenWorker, owner: Connection
) -> None:
    """Otherwise a sweep could recover the row, which its worker still runs, after the lock."""
    bench = worker.bench
    if not has_row_locks(bench.store):
        return
    ended: list[int] = []

    @bench.registry.processor("long")
    def work(body: object, task: DelayTask) -> None:
        over, t = bench.store.tasks.now(), bench.store.schema.tasks
        with bench.store.database.begin() as connection:
            connection.execute(update(t).where(t.c.id == task.id).values(lease_until=over))
        bench.store.tasks._moves.locked(owner, task.id)
        worker.now_s += LEASE_S / 2
        worker.renew()
        assert bench.now(task).lease_until == over
        owner.get_transaction().rollback()  # type: ignore[union-attr]
        worker.now_s += 1
        worker.run_keeper(lambda: bench.now(task).lease_until != over)
        ended.append(task.id)

    task = bench.schedule("long")
    bench.run(task)
    assert ended == [task.id]
    assert bench.now(task).status is Status.DONE


def test_a_process_is_dead_although_its_last_report_came_after_its_death(
    worker: FrozenWorker,
) -> None:
    """Otherwise the worker would wait for its rows, and kill this process id, when it stops."""
    dead, found = 2**22 + 1, list[int]()
    worker.dispatcher.running = lambda: ([], {} if found else {dead: (7,)})
    worker.dispatcher.process_died = lambda pid: found.append(pid)
    worker.run_keeper(lambda: bool(found))
    assert found == [dead]
