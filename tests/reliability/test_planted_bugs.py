"""The checker finds each planted bug, and nothing in the unchanged code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, true, update

from chaos.checker import _LEGAL, Checker, Verdict
from chaos.history import CallRecord, Effect, Fault, History, RunRecord
from chaos.recorder import Recorder
from delaytasks import DelayedTask
from delaytasks.core import text
from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.core.states import Status
from delaytasks.execution.executor import TaskExecutor
from delaytasks.storage import leases as lapses
from delaytasks.storage.leases import Renewed
from delaytasks.storage.row_lists import Prepared
from delaytasks.storage.settlements import Settlements
from delaytasks.storage.store import Store
from tests.conftest import open_store
from tests.world import World

pytestmark = pytest.mark.slow

MAX_LOST_LEASES = 5
Scene = Callable[["SmallDeployment"], None]


class SmallDeployment:
    """A small deployment in one process. The scene triggers all messages, sweeps and workers."""

    def __init__(self, store: Store) -> None:
        self.world = World(store)
        self.store, self.history = store, History()
        self.recorder = Recorder(store)
        self.recorder.start()
        self.body: Callable[[DelayedTask], object] = lambda task: None
        self.world.delays.processor("work")(self._work)
        self.sweeper = self.world.runtime.sweeper

    def now_us(self) -> int:
        return to_us(self.store.tasks.now())

    def schedule(self, delay: float = 0, **fields: Any) -> DelayedTask:
        asked_us = self.now_us()
        task = self.world.schedule("work", delay=delay) if delay else self._due_now()
        self.history.call_records.append(
            CallRecord(
                task.id,
                "schedule",
                "ok",
                asked_us,
                self.now_us(),
                to_us(task.expected_time),
                **fields,
            )
        )
        return task

    def _due_now(self) -> DelayedTask:
        task = self.world.schedule("work", delay=0.001)
        threading.Event().wait(0.01)
        return task

    def deliver(self, task: DelayedTask, version: int = 0) -> None:
        """Deliver a message to a worker that runs its entries."""
        self.world.worker().run_entries([Entry(task.id, version, to_us(task.expected_time))])

    def claim(self, task: DelayedTask, version: int = 0) -> DelayedTask:
        [claimed] = self.store.claims("worker-2", None).claim([Entry(task.id, version, 0)])
        return claimed

    def lease_ends(self) -> None:
        """Let time pass without renewals, then sweep."""
        t, over = self.store.schema.tasks, self.store.tasks.now() - timedelta(seconds=1)
        running = t.c.status == int(Status.RUNNING)
        with self.store.database.begin() as connection:
            connection.execute(update(t).where(running).values(lease_until=over))
        self.sweep()

    def sweep(self) -> None:
        self.store.sweeps.recover(MAX_LOST_LEASES, 100)

    def fault(self, kind: str, since_us: int, effect: Effect) -> None:
        self.history.faults.append(
            Fault(kind, "worker-2", since_us, self.now_us(), effect, ("worker-2",))
        )

    def verdict(self) -> Verdict:
        history = replace(self.history, changes=list(self.recorder.changes()))
        return Checker(history, MAX_LOST_LEASES, self.now_us()).verdict()

    def _work(self, body: object, task: DelayedTask) -> object:
        begun = RunRecord(task.id, task.version, "worker-1", self.now_us())
        self.history.run_records.append(begun)
        try:
            return self.body(task)
        finally:
            self.history.run_records.remove(begun)
            self.history.run_records.append(replace(begun, ended_us=self.now_us()))


@pytest.fixture
def deployment(database_url: str) -> Iterator[SmallDeployment]:
    store = open_store(database_url, table_prefix="planted_")
    deployment = SmallDeployment(store)
    yield deployment
    deployment.recorder.stop()
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()


# -- scenes without findings in the unchanged code ---------------------------------------------


def delivered_twice(deployment: SmallDeployment) -> None:
    task = deployment.schedule()
    deployment.deliver(task)
    deployment.deliver(task)


def frozen_worker(deployment: SmallDeployment) -> None:
    """A worker is frozen past its lease, and continues after another worker finished its task."""
    task, since_us = deployment.schedule(), deployment.now_us()
    late = deployment.claim(task)
    deployment.history.run_records.append(
        RunRecord(late.id, late.version, "worker-2", deployment.now_us())
    )
    deployment.lease_ends()
    deployment.fault("SIGSTOP", since_us, "away")
    deployment.world.drain()
    deployment.store.claims("worker-2", None).settle([Settlement(late, "succeed")])


def killed_producer(deployment: SmallDeployment) -> None:
    """A producer is killed after the acknowledgement, before the task is armed."""
    deployment.schedule()
    deployment.world.drain()


def lost_message(deployment: SmallDeployment) -> None:
    """The message of a near task is lost; the sweep sends another one."""
    deployment.schedule(delay=0.3)
    deployment.world.broker.lose()
    deployment.sweeper.sweep()
    threading.Event().wait(0.35)
    deployment.world.deliver()


def early_message(deployment: SmallDeployment) -> None:
    task = deployment.schedule(delay=3600)
    deployment.deliver(task)


def slow_processor(deployment: SmallDeployment) -> None:
    """A processor is slower than its lease; a sweep runs meanwhile."""
    task = deployment.schedule()
    since = deployment.store.tasks.now() - timedelta(seconds=1)

    def body(task: DelayedTask) -> None:
        if len(deployment.history.run_records) > 1:
            return
        t = deployment.store.schema.tasks
        over = deployment.store.tasks.now() - timedelta(seconds=1)
        with deployment.store.database.begin() as connection:
            connection.execute(update(t).where(t.c.id == task.id).values(lease_until=over))
        deployment.store.leases.renew([claimed_by(deployment, task)], since)
        deployment.sweep()
        deployment.world.drain(by="worker-3")

    deployment.body = body
    deployment.deliver(task)


def poison(deployment: SmallDeployment) -> None:
    """A task kills every worker that runs it."""
    task = deployment.schedule()
    for _ in range(10):
        since_us = deployment.now_us()
        row = deployment.store.tasks.get(task.id)
        assert row is not None
        found = deployment.store.claims("worker-2", None).claim_alone(task.id, row.version)
        if not found:
            return
        [claimed] = found
        deployment.history.run_records.append(
            RunRecord(claimed.id, claimed.version, "worker-2", deployment.now_us())
        )
        deployment.lease_ends()
        deployment.fault("abort", since_us, "dead")


def bad_error_text(deployment: SmallDeployment) -> None:
    def body(task: DelayedTask) -> None:
        raise ValueError("a \x00 and a \ud800 in the text")

    deployment.body = body
    task = deployment.schedule()
    try:
        deployment.deliver(task)
    except Exception:
        deployment.fault("the chunk failed", 0, "away")
        deployment.lease_ends()


def claimed_by(deployment: SmallDeployment, task: DelayedTask) -> str:
    found = deployment.store.tasks.get(task.id)
    assert found is not None
    assert found.worker is not None
    return found.worker


SCENES: list[Scene] = [
    delivered_twice,
    frozen_worker,
    killed_producer,
    lost_message,
    early_message,
    slow_processor,
    poison,
    bad_error_text,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_there_are_no_findings_in_the_unchanged_code(
    deployment: SmallDeployment, scene: Scene
) -> None:
    scene(deployment)
    assert str(deployment.verdict()).endswith("nothing found"), str(deployment.verdict())


# -- bugs -----------------------------------------------------------------------------------------


def no_version_check_on_claim(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    claim_queries, t = (
        deployment.world.worker().claims._claim_queries,
        deployment.store.schema.tasks,
    )
    pick = claim_queries._query(
        select(*claim_queries._candidate).where(t.c.id == stage_id(deployment))
    )
    patch.setattr(claim_queries, "named", lambda *which: (pick, {}))


def stage_id(deployment: SmallDeployment) -> Any:
    t = deployment.store.schema.tasks
    return select(t.c.id).limit(1).scalar_subquery()


def no_fence_on_finish(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    t = deployment.store.schema.tasks
    values = {"status": int(Status.DONE), "version": t.c.version + 1}
    anything = Prepared(deployment.store.database, update(t).where(true()).values(values))
    settle = Settlements._settled

    def settled(ends: Any, connection: Any, ordered: Any) -> set[int]:
        ends._same_version = ends._same_end = ends._any_end = lambda connection, parameters: (
            anything(connection, {})
        )
        return settle(ends, connection, ordered)

    patch.setattr(Settlements, "_settled", settled)


def acknowledged_before_it_is_written(
    deployment: SmallDeployment, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(deployment.store.tasks, "insert", lambda task, *rest: True)


def no_sweep(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deployment.sweeper, "sweep", lambda: True)


def the_workers_clock_decides(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    claim_queries, t = (
        deployment.world.worker().claims._claim_queries,
        deployment.store.schema.tasks,
    )
    fast = datetime.now(tz=deployment.store.tasks.now().tzinfo) + timedelta(hours=2)
    pick = claim_queries._query(select(*claim_queries._candidate).where(t.c.expected_time <= fast))
    patch.setattr(claim_queries, "named", lambda *which: (pick, {}))


def no_heartbeat(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deployment.store.leases, "renew", lambda workers, since: Renewed(0))


def lapses_not_counted(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    def uncounted(t: Any, max_lost_leases: int, reason: str = "") -> Any:
        return update(t).values(
            status=int(Status.NOT_COMPLETE), version=t.c.version + 1, lease_until=None
        )

    patch.setattr(lapses, "recover_statement", uncounted)


def unsanitised_error_text(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(text, "storable", lambda raw, max_bytes: raw)


def failed_instead_of_run(deployment: SmallDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TaskExecutor,
        "run",
        lambda _, processor, tasks, claimed: [Settlement(t, "fail") for t in tasks],
    )


BUGS = [
    (no_version_check_on_claim, delivered_twice, {"illegal move"}),
    (no_fence_on_finish, frozen_worker, {"double finish"}),
    (acknowledged_before_it_is_written, killed_producer, {"lost"}),
    (failed_instead_of_run, lost_message, {"lost"}),
    (no_sweep, lost_message, {"stuck"}),
    (the_workers_clock_decides, early_message, {"early"}),
    (no_heartbeat, slow_processor, {"duplicated"}),
    (lapses_not_counted, poison, {"too often"}),
    (unsanitised_error_text, bad_error_text, {"stuck"}),
]


@pytest.mark.parametrize(("bug", "scene", "kinds"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS])
def test_a_planted_bug_is_found(
    deployment: SmallDeployment,
    monkeypatch: pytest.MonkeyPatch,
    bug: Any,
    scene: Scene,
    kinds: set[str],
) -> None:
    bug(deployment, monkeypatch)
    scene(deployment)
    assert kinds <= set(deployment.verdict().counts()), str(deployment.verdict())


def test_a_fault_of_another_worker_does_not_hide_a_bug(
    deployment: SmallDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_heartbeat(deployment, monkeypatch)
    since_us = deployment.now_us()
    slow_processor(deployment)
    deployment.fault("SIGSTOP", since_us, "away")
    deployment.fault("kill -9", since_us, "dead")
    assert "duplicated" in deployment.verdict().counts(), str(deployment.verdict())


def test_a_finding_contains_the_whole_story_of_its_task(
    deployment: SmallDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_version_check_on_claim(deployment, monkeypatch)
    delivered_twice(deployment)
    printed = str(deployment.verdict())
    run, *_ = deployment.history.run_records
    for words in (
        "producer: schedule",
        f"processor: version {run.version} begins",
        "row: new -> NOT_COMPLETE 0",
        "DONE",
    ):
        assert words in printed


def test_all_moves_of_the_table_are_legal() -> None:
    assert {(Status.NOT_COMPLETE, Status.RUNNING), (Status.RUNNING, Status.DONE)} <= _LEGAL
