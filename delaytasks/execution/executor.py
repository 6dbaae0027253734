"""Calls processors for one task or for a batch, and turns each call into settlements."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.errors import InvalidOutcomesError
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask, current_run
from delaytasks.execution.deferral_rules import DeferralRules
from delaytasks.execution.outcome_rules import OutcomeRules
from delaytasks.execution.processor_call import ProcessorCall
from delaytasks.execution.run_counter import RunCounter
from delaytasks.execution.task_run import Lease, TaskRun, TransactionOf
from delaytasks.processors.registry import ProcessorSpec

if TYPE_CHECKING:
    from delaytasks.storage.claims import Claims

logger = logging.getLogger("delaytasks")
_EXITS = (SystemExit, KeyboardInterrupt)


class RunResult(NamedTuple):
    """The settlement of one task, with the value or the error of its processor."""

    settlement: Settlement
    value: object = None
    error: BaseException | None = None


#: Returns the settlements of one call from its value or its error.
Finish = Callable[[object, BaseException | None], Sequence[RunResult]]
#: Calls the processor, and then `Finish`, in the context that the processor expects. An exception
#: that it raises before it has called `Finish` counts as the processor's.
Execute = Callable[[ProcessorCall, Finish], object]


def ends_process(error: BaseException) -> bool:
    """Whether the error is Celery's WorkerShutdown or WorkerTerminate, which end the worker."""
    return isinstance(error, _EXITS) and type(error) not in _EXITS


def emit_start(events: Events, task: DelayTask, began: datetime) -> None:
    events.emit("task.started", **task.event_fields, began=began)


class Watcher(Protocol):
    """Observes the run of each row; its methods must not raise."""

    def started(self, task: DelayTask, claimed: datetime, began: datetime) -> None: ...
    def ended(self, ending: Settlement, ended: datetime, error: BaseException | None) -> None: ...
    def expired(self, ending: Settlement, claimed: datetime) -> None: ...
    def defer(self, task: DelayTask, claimed: datetime, why: str) -> None: ...
    def flush(self) -> None:
        """Send what was observed."""


class TaskExecutor:
    """Runs tasks.

    `watcher` returns the watcher of the moment, or None. `counter` counts the runs for the
    statistics, if they are on. `on_start` is called with each task before it runs, and with the
    time.
    """

    def __init__(
        self,
        claims: Claims,
        clock: Clock,
        deferral_rules: DeferralRules,
        outcome_rules: OutcomeRules,
        execute: Execute,
        transaction_of: TransactionOf,
        lease: Lease,
        watcher: Callable[[], Watcher | None],
        counter: RunCounter | None = None,
        on_start: Callable[[DelayTask, datetime], object] | None = None,
    ) -> None:
        self._claims = claims
        self._clock = clock
        self._deferral_rules = deferral_rules
        self._outcome_rules = outcome_rules
        self._execute = execute
        self._transaction_of = transaction_of
        self._lease = lease
        self._watcher = watcher
        self._counter = counter
        self._on_start = on_start

    def run(
        self, processor: ProcessorSpec | None, tasks: Sequence[DelayTask], claimed: datetime
    ) -> list[Settlement]:
        """Run tasks of one tag, one or as many as its processor takes in one call."""
        watcher, began = self._watcher(), self._clock.now()
        settlements, ready = self._defer(processor, tasks, claimed, watcher)
        if processor is None:
            return settlements
        for call in self._calls(processor, ready):
            if watcher is not None or self._on_start is not None:
                self._started(call, claimed, began, watcher)
            ended: list[RunResult] = []
            context, end = copy_context(), self._end(call, began, ended, watcher)
            context.run(current_run.set, call)
            try:
                context.run(self._execute, call, end)
            except BaseException as error:
                if ends_process(error):
                    raise
                self._raised(call, error, ended, end)
            settlements += [one.settlement for one in ended]
        return settlements

    def _started(
        self, call: ProcessorCall, claimed: datetime, began: datetime, watcher: Watcher | None
    ) -> None:
        for run in call.runs:
            if watcher is not None:
                watcher.started(run.task, claimed, began)
            if self._on_start is not None:
                self._on_start(run.task, began)

    def failed(
        self, processor: ProcessorSpec, tasks: Sequence[DelayTask], error: BaseException
    ) -> list[Settlement]:
        """Return the settlements of tasks for which `run` itself has raised."""
        began = self._clock.now()
        return [self._outcome_rules.of_error(processor, task, began, error) for task in tasks]

    @property
    def is_watched(self) -> bool:
        return self._watcher() is not None

    def flush(self) -> None:
        """Let the watcher send what it has observed."""
        watcher = self._watcher()
        if watcher is not None:
            watcher.flush()

    # -- calls ------------------------------------------------------------------------------------

    def _defer(
        self,
        processor: ProcessorSpec | None,
        tasks: Sequence[DelayTask],
        claimed: datetime,
        watcher: Watcher | None,
    ) -> tuple[list[Settlement], list[DelayTask]]:
        """Return the settlements of the tasks that do not run here, and the tasks that do."""
        settlements: list[Settlement] = []
        ready: list[DelayTask] = []
        for task in tasks:
            settlement = self._deferral_rules.settlement(processor, task)
            if settlement is None:
                ready.append(task)
                continue
            settlements.append(settlement)
            if watcher is not None and settlement.move == "expire":
                watcher.expired(settlement, claimed)
            elif watcher is not None:
                watcher.defer(task, claimed, settlement.error or "")
        return settlements, ready

    def _calls(
        self, processor: ProcessorSpec, tasks: Sequence[DelayTask]
    ) -> Iterator[ProcessorCall]:
        if processor.batch is None:
            for task in tasks:
                yield ProcessorCall(processor, [self._run(task)])
            return
        runs: list[TaskRun] = []
        bodies: list[Any] = []
        for task in tasks:
            run = self._run(task)
            try:
                bodies.append(processor.checked(processor.body_of(task)))
            except Exception as error:  # fails this task alone, with this traceback
                yield ProcessorCall(processor, [run], refusal=error)
            else:
                runs.append(run)
        if runs:
            yield ProcessorCall(processor, runs, bodies)

    def _run(self, task: DelayTask) -> TaskRun:
        return TaskRun(task, self._claims, self._transaction_of, self._lease)

    # -- ends -------------------------------------------------------------------------------------

    def _end(
        self, call: ProcessorCall, began: datetime, ended: list[RunResult], watcher: Watcher | None
    ) -> Finish:
        """Return the function that fills `ended` from what the processor returned or raised."""

        def end(value: object, error: BaseException | None) -> Sequence[RunResult]:
            values = [value] * len(call.runs)
            if error is None:
                try:
                    values = call.outcomes(value)
                except InvalidOutcomesError as refusal:
                    error = refusal
            for run, one in zip(call.runs, values, strict=True):
                settlement, raised = self._outcome_rules.settlement(
                    call.processor, run, began, one, error
                )
                if watcher is not None:
                    watcher.ended(settlement, self._clock.now(), raised)
                if self._counter is not None:
                    self._counter.add_run(run.task, began, monotonic() - run.began)
                ended.append(RunResult(settlement, one, raised))
            return ended

        return end

    def _raised(
        self, call: ProcessorCall, error: BaseException, ended: list[RunResult], end: Finish
    ) -> None:
        """Settle a call whose `execute` has raised, or log the error if the call is settled."""
        if not ended:
            end(None, error)
            return
        where = "delaytasks: an error after the end of task %s (tag %r)"
        logger.error(where, call.task.id, call.task.tag, exc_info=error)
