"""The processors of Django tasks: call the function, and send the signals about the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from asgiref.sync import sync_to_async
from django.dispatch import Signal

from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.task_calls import TaskCall
from delaytasks.contrib.django.task_framework import (
    TaskContext,
    TaskResult,
    normalize_json,
    task_finished,
    task_started,
)
from delaytasks.contrib.django.task_results import result_of_row
from delaytasks.core.errors import LeaseLostError
from delaytasks.core.states import Status
from delaytasks.core.task import Attempt, DelayTask, Done
from delaytasks.core.text import traceback_text
from delaytasks.execution.executor import ends_process
from delaytasks.runtime import runtime_of
from delaytasks.worker.celery_tasks import processes_of


def run_task(call: TaskCall, row: DelayTask) -> Done:
    """Call the function of a Django task."""
    run = DjangoTaskRun(call, row)
    try:
        value = normalize_json(run.task.func(*run.args, **call.kwargs))
    except BaseException as error:
        run.failed(error)
        raise
    return run.succeeded(value)


async def arun_task(call: TaskCall, row: DelayTask) -> Done:
    """Call the coroutine function of a Django task.

    Receivers of the signals are called in the thread in which Django's ORM has its connection.
    """
    run = await sync_to_async(DjangoTaskRun)(call, row)
    try:
        value = normalize_json(await run.task.func(*run.args, **call.kwargs))
    except Exception as error:
        await sync_to_async(run.failed)(error)
        raise
    return await sync_to_async(run.succeeded)(value)


class DjangoTaskRun:
    """One run, from the signal `task_started` to `task_finished`."""

    def __init__(self, call: TaskCall, row: DelayTask) -> None:
        delays = project_delays()
        self._wiring = runtime_of(delays)
        self._call = call
        self._attempts = delays.attempts(row) if row.attempts > 1 else []
        worker = processes_of(self._wiring.celery).name(os.getpid())
        # A claimed row is without the columns that its claim has just written.
        self._row = replace(row, worker=worker, execution_time=self._wiring.clock.now())
        self.task = call.task(row)
        started = result_of_row(self.task, call, self._row, self._attempts)
        self.args = [TaskContext(task_result=started)] if self.task.takes_context else []
        self.args += call.args
        self._send(task_started, started)

    def succeeded(self, value: object) -> Done:
        """Send `task_finished`, and return the outcome."""
        result = self._finished(Status.DONE, self._attempts)
        object.__setattr__(result, "_return_value", value)
        self._send(task_finished, result)
        return Done(value)

    def failed(self, error: BaseException) -> None:
        """Send `task_finished`, unless the task will run again."""
        row, settings = self._row, self._wiring.settings
        processor = self._wiring.registry.get(row.tag)
        retries = processor and processor.retry_schedule_for(error, row)
        has_retry = bool(retries and retries.has_retry_delay(row.attempts))
        if has_retry or ends_process(error) or isinstance(error, LeaseLostError):
            return
        text, now = traceback_text(error, settings.max_error_bytes), self._wiring.clock.now()
        last = Attempt(row.attempts, row.execution_time, now, row.worker, text)
        self._send(task_finished, self._finished(Status.FAILED, [*self._attempts, last]))

    def _finished(self, status: Status, attempts: Sequence[Attempt]) -> TaskResult:
        row = replace(self._row, status=status, update_time=self._wiring.clock.now())
        return result_of_row(self.task, self._call, row, attempts)

    def _send(self, signal: Signal, result: TaskResult) -> None:
        # A receiver that fails is logged by Django, and does not change the outcome.
        signal.send_robust(type(self.task.get_backend()), task_result=result)
