"""Rows that were deferred because no worker could enforce the time limits of their tag."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from delaytasks import DelayTasks, Status
from delaytasks.core.text import is_deferred_until
from delaytasks.execution.executor import DeferralRules
from delaytasks.processors.registry import Registry
from delaytasks.runtime import runtime_of
from delaytasks.worker.celery_tasks import processes_of
from delaytasks.worker.worker_runtime import WorkerRuntime
from tests.conformance.test_deferrals_without_processor import bring
from tests.recording import RecordingTimer


def defer(delays: DelayTasks) -> Any:
    """Defer a row as a worker with threads does."""
    task = delays.schedule_delay("limited", {}, 0)
    claims = runtime_of(delays).store.claims("w", None)
    [claimed] = claims.claim_due("default", [0], 1)
    wiring = runtime_of(delays)
    registry = Registry()
    registry.processor("limited", time_limit=60)(lambda body: None)
    rules = DeferralRules(
        delays.settings, wiring.clock, delays.events, registry, False, lambda id, version: False
    )
    deferral = rules.settlement(registry.get("limited"), claimed)
    assert deferral is not None
    assert claims.settle([deferral])
    found = delays.get(task)
    assert (found.status, found.expected_time > runtime_of(delays).clock.now()) == (
        Status.NOT_COMPLETE,
        True,
    )
    return found


def test_a_worker_that_keeps_time_limits_brings_deferred_rows_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    task = defer(delays)
    assert is_deferred_until(task.error, task.expected_time)
    assert bring(delays, "other") == []
    assert bring(delays, "limited") == [task.id]
    assert delays.get(task).expected_time < task.expected_time


def test_a_rescheduled_row_keeps_its_time(delays: DelayTasks, timer: RecordingTimer) -> None:
    task = defer(delays)
    delays.reschedule(task, 60)
    assert bring(delays, "limited") == []


def test_a_worker_that_keeps_no_time_limits_does_not_bring_them_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    delays.processor("limited", time_limit=60)(lambda body: None)
    task = defer(delays)
    processes_of(runtime_of(delays).celery).queues = ["default"]
    celery_worker = SimpleNamespace(pool=None, hub=None, hostname="w", call_soon=lambda call: None)
    processes = processes_of(runtime_of(delays).celery)
    loop = WorkerRuntime(runtime_of(delays), processes, celery_worker, polls_table=False).sweep_loop
    processes.keeps_time_limits = False
    loop._bring_forward()
    assert delays.get(task).version == task.version
    processes.keeps_time_limits = True
    loop._bring_forward()
    assert delays.get(task).version > task.version
