"""`check_lease` informs a long processor before its lease ends, without a database query."""

from __future__ import annotations

import os

import pytest

from delaytasks import DelayTask, Status
from delaytasks.core.errors import LeaseLostError, NotRunningError
from delaytasks.core.workers import LastRenewal
from delaytasks.execution import executor as run_module
from delaytasks.worker.shared_memory import Renewals
from tests.recording import RunnerHarness
from tests.unit.conftest import Make

LEASE_S = 60


class Watch:
    """The monotonic clock of a run, and the time of the last lease renewal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.renewed = float("-inf")
        monkeypatch.setattr(run_module, "monotonic", lambda: self.now)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture
def bench(make: Make, watch: Watch) -> RunnerHarness:
    bench = make(lease_s=LEASE_S, chunk_time_budget_s=1)
    bench.runner = bench.make_runner(last_renewal=lambda: LastRenewal(watch.renewed, float("-inf")))
    return bench


def is_told(task: DelayTask) -> str:
    try:
        task.check_lease()
    except LeaseLostError as error:
        return str(error)
    return ""


def test_check_lease_raises_after_two_failed_renewals_and_not_before(
    bench: RunnerHarness, watch: Watch
) -> None:
    told: list[str] = []

    @bench.registry.processor("long")
    def work(body: object, task: DelayTask) -> None:
        # The loop renews the lease in each turn.
        for _ in range(3):
            watch.renewed, watch.now = watch.now, watch.now + LEASE_S / 2
            task.check_lease()
        for after_s in (LEASE_S * 2 / 3, LEASE_S * 2 / 3 + 1):
            watch.now = watch.renewed + after_s
            told.append(is_told(task))

    bench.run(bench.schedule("long"))
    assert told[0] == ""
    assert "ends in 19.0 s" in told[1]


def test_a_processor_that_raises_the_lease_error_runs_again_without_using_an_attempt(
    bench: RunnerHarness, watch: Watch
) -> None:
    @bench.registry.processor("long")
    def work(body: object, task: DelayTask) -> None:
        watch.now += LEASE_S
        task.check_lease()

    task = bench.schedule("long")
    bench.run(task)
    now = bench.now(task)
    assert (now.status, now.attempts, now.error) == (Status.NOT_COMPLETE, 0, None)
    assert [entry.id for entry in bench.timer.armed] == [task.id], "and at once"
    assert [fields["id"] for fields in bench.named("task.interrupted")] == [task.id]
    assert bench.events.counts["task.failed"] == 0


def test_each_task_of_a_batch_can_be_asked_about_and_no_other(bench: RunnerHarness) -> None:
    others = [bench.schedule("note")]

    @bench.registry.processor("many", batch=5)
    def work(tasks: list[DelayTask]) -> None:
        for task in tasks:
            task.check_lease()
        others[0].check_lease()

    tasks = [bench.schedule("many") for _ in range(2)]
    bench.run(*tasks)
    assert all("NotRunningError" in (bench.now(task).error or "") for task in tasks)
    with pytest.raises(NotRunningError, match="check_lease"):
        others[0].check_lease()


def test_children_see_the_renewals_that_the_main_process_records() -> None:
    renewals = Renewals()
    assert renewals.last() == (0, 0)
    renewals.record(asked_at=61.5, answered_at=61.5, lease_s=60)
    child = os.fork()
    if child == 0:
        is_seen = renewals.last() == (61.5, 1.5)
        renewals.record(asked_at=62.5, answered_at=62.5, lease_s=60)
        os._exit(0 if is_seen else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert renewals.last() == (62.5, 1.5)
    renewals.record(asked_at=80, answered_at=81, lease_s=60)
    assert renewals.last() == (80, 1.5), "no lease ended between the two renewals"
    renewals.record(asked_at=100, answered_at=141, lease_s=60)
    assert renewals.last() == (100, 81), "leases ended before the answer"


def test_a_lease_error_that_the_processor_itself_creates_is_a_failure(
    bench: RunnerHarness,
) -> None:
    @bench.registry.processor("wrong")
    def work(body: object, task: DelayTask) -> None:
        raise LeaseLostError("as complete() says on a wrong database", task.id)

    task = bench.schedule("wrong")
    bench.run(task)
    now = bench.now(task)
    assert (now.status, now.attempts) == (Status.FAILED, 1), "or it would run again and again"
