"""Time limits of processors, and how a long processor learns of its lease."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.concurrency import prefork, solo, thread
from celery.exceptions import SoftTimeLimitExceeded
from coverage import Coverage

from delaytasks import DelayedTask, LeaseLostError, Status, TaskStateError
from delaytasks.core.clock import monotonic
from delaytasks.core.workers import LastRenewal
from delaytasks.execution import executor as run_module
from delaytasks.processors.registry import ProcessorSpec, Registry
from delaytasks.worker.lease_keeper import has_exited
from delaytasks.worker.shared_memory import Renewals
from delaytasks.worker.time_limits import can_limit_time, limited
from tests.refusals import invalid
from tests.waiting import wait_until
from tests.world import MakeWorld, World

# -- A processor can declare time limits, which leave no state behind after its run ---------------


def processor(**limits: Any) -> ProcessorSpec:
    registry = Registry()
    registry.processor("a", **limits)(lambda body: None)
    return next(iter(registry))


@pytest.fixture
def handler() -> Iterator[Callable[..., None]]:
    """Yield a handler that user code has installed for the signal of soft time limits."""

    def ours(*_: Any) -> None:
        raise AssertionError("a limit struck that was over")

    before = signal.signal(signal.SIGALRM, ours)
    yield ours
    signal.signal(signal.SIGALRM, before)


def test_time_limits_are_written_as_durations() -> None:
    both = processor(soft_time_limit="1m30s", time_limit=120)
    assert (both.soft_time_limit_s, both.time_limit_s, both.has_time_limits) == (90, 120, True)
    assert not processor().has_time_limits
    assert processor(soft_time_limit=1).has_time_limits
    assert processor(time_limit=1).has_time_limits


@pytest.mark.parametrize(
    "limits",
    [
        {"soft_time_limit": 0},
        {"time_limit": -1},
        {"time_limit": "soon"},
        {"time_limit": float("nan")},
        {"soft_time_limit": 5, "time_limit": 5},
        {"soft_time_limit": "1m", "time_limit": 5},
    ],
    ids=str,
)
def test_invalid_time_limits_are_refused(limits: dict[str, Any]) -> None:
    with invalid(next(iter(limits))):
        processor(**limits)


def test_a_registry_knows_the_tags_whose_runs_may_be_killed() -> None:
    registry = Registry()
    registry.processor("hard", time_limit="5s")(lambda body: None)
    registry.processor("soft", soft_time_limit=5)(lambda body: None)
    assert registry.time_limits == {"hard": 5}


def test_a_soft_limit_raises_in_the_processor_and_leaves_nothing_behind(
    handler: Callable[..., None],
) -> None:
    began = monotonic()
    with pytest.raises(SoftTimeLimitExceeded, match=r"\(0\.05,\)"):
        limited(processor(soft_time_limit=0.05), lambda: time.sleep(20))
    assert monotonic() - began < 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_soft_limit_at_the_end_of_the_processor_has_no_effect_after_the_call(
    handler: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if Coverage.current():
        pytest.skip("an exception in a trace function leaves coverage's lock held for ever")
    armed: list[bool] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda *args, **options: armed.append(True)
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(False))
    limit_s, ends = 0.002, {True: 0, False: 0}
    spread = processor(soft_time_limit=limit_s, time_limit=60)
    for n in range(1500):
        until = monotonic() + limit_s + (n % 100 - 50) * 4e-6

        def call(until: float = until) -> None:
            while monotonic() < until:
                pass

        try:
            limited(spread, call)
            ends[True] += 1
        except SoftTimeLimitExceeded:
            ends[False] += 1
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert armed[-2:] == [True, False], (
            "the hard one is disarmed, whenever the soft one strikes"
        )
    assert min(ends.values()) > 50, "else nothing was tried"


def test_a_hard_limit_is_disarmed_after_the_call_and_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        faulthandler,
        "dump_traceback_later",
        lambda s, **options: calls.append((s, options["exit"])),
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("over"))
    assert limited(processor(time_limit=7), lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        limited(processor(time_limit=7), lambda: 1 / 0)
    assert calls == [(7, True), "over"] * 2


def test_only_prefork_can_keep_limits() -> None:
    assert can_limit_time(prefork.TaskPool(1))
    assert not can_limit_time(solo.TaskPool(1))
    assert not can_limit_time(thread.TaskPool(1))


def test_a_dead_child_is_detected_before_and_after_it_is_waited_for() -> None:
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reads, 1)
        os._exit(1)
    assert not has_exited(pid)
    os.write(writes, b"!")
    wait_until(lambda: has_exited(pid), 10, "the child to be dead")
    assert has_exited(pid)
    assert os.waitpid(pid, 0)[0] == pid, "its parent's pool still hears of it"
    assert has_exited(pid), "and who heard of it in the pool's place does not hide it"
    assert not has_exited(os.getpid())
    os.close(reads)
    os.close(writes)


# -- `check_lease` informs a long processor before its lease ends, without a database query -------


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
def world(make_world: MakeWorld, watch: Watch) -> World:
    world = make_world(lease=LEASE_S, _chunk_time_budget_s=1)
    renewals = SimpleNamespace(last=lambda: LastRenewal(watch.renewed, float("-inf")))
    world.worker(renewals=renewals)
    return world


def is_told(task: DelayedTask) -> str:
    try:
        task.check_lease()
    except LeaseLostError as error:
        return str(error)
    return ""


def test_check_lease_raises_after_two_failed_renewals_and_not_before(
    world: World, watch: Watch
) -> None:
    told: list[str] = []

    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        # The loop renews the lease in each turn.
        for _ in range(3):
            watch.renewed, watch.now = watch.now, watch.now + LEASE_S / 2
            task.check_lease()
        for after_s in (LEASE_S * 2 / 3, LEASE_S * 2 / 3 + 1):
            watch.now = watch.renewed + after_s
            told.append(is_told(task))

    world.run(world.schedule("long"))
    assert told[0] == ""
    assert "ends in 19.0 s" in told[1]


def test_a_processor_that_raises_the_lease_error_runs_again_without_using_an_attempt(
    world: World, watch: Watch
) -> None:
    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        watch.now += LEASE_S
        task.check_lease()

    task = world.schedule("long")
    world.broker.lose()
    world.run(task)
    now = world.read(task)
    assert (now.status, now.runs, now.error) == (Status.NOT_COMPLETE, 0, None)
    assert [entry.id for entry in world.broker.armed] == [task.id], "and at once"
    assert [fields["id"] for fields in world.told("task.interrupted")] == [task.id]
    assert world.count("task.failed") == 0


def test_each_task_of_a_batch_can_be_asked_about_and_no_other(world: World) -> None:
    others = [world.schedule("note")]

    @world.delays.processor("many", batch=5)
    def work(tasks: list[DelayedTask]) -> None:
        for task in tasks:
            task.check_lease()
        others[0].check_lease()

    tasks = [world.schedule("many") for _ in range(2)]
    world.run(*tasks)
    assert all("TaskStateError: task" in (world.read(task).error or "") for task in tasks)
    with pytest.raises(TaskStateError, match="check_lease"):
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


def test_a_lease_error_that_the_processor_itself_creates_is_a_failure(world: World) -> None:
    @world.delays.processor("wrong")
    def work(body: object, task: DelayedTask) -> None:
        raise LeaseLostError("as complete() says on a wrong database", task.id)

    task = world.schedule("wrong")
    world.run(task)
    now = world.read(task)
    assert (now.status, now.runs) == (Status.FAILED, 1), "or it would run again and again"
