"""How rows are run: their processor is called, for one or for a batch, and what it returns or raises is their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from delaytasks.core.clock import Clock
from delaytasks.core.current_run import Current, current_run
from delaytasks.core.errors import InvalidOutcomesError
from delaytasks.core.interfaces import ClaimStore, Settlement
from delaytasks.core.task import DelayTask
from delaytasks.execution.batch import Batch, Runs, Work, outcomes_of
from delaytasks.execution.outcome_rules import OutcomeRules
from delaytasks.execution.task_run import LeaseOf, TaskRun, UnitOf
from delaytasks.processors.registry import Processor, Registry

logger = logging.getLogger("delaytasks")


class Ended(NamedTuple):
    """How the run of one task ended, and what its processor returned or raised."""

    settlement: Settlement
    value: object = None
    error: BaseException | None = None


#: Makes the ends of the tasks of one call from what their processor returned or raised.
End = Callable[[object, BaseException | None], Sequence[Ended]]
#: Calls the processor, and then `End` where everybody who watches still sees the task as running. What it raises
#: before it has called `End` is taken for the processor's error.
Execute = Callable[[Work, DelayTask, End], object]
_EXITS = (SystemExit, KeyboardInterrupt)


def ends_process(error: BaseException) -> bool:
    """Celery's WorkerShutdown and WorkerTerminate: they end the worker, and are no end of a task."""
    return isinstance(error, _EXITS) and type(error) not in _EXITS


class Watcher(Protocol):
    """Sees every row's run, and is told when to pass on what it saw. It must not raise."""

    def started(self, task: DelayTask, claimed: datetime, began: datetime) -> None: ...
    def ended(self, ending: Settlement, ended: datetime, error: BaseException | None) -> None: ...
    def expired(self, ending: Settlement, claimed: datetime) -> None: ...
    def defer(self, task: DelayTask, claimed: datetime, why: str) -> None: ...
    def flush(self) -> None: ...


class TaskExecutor:
    """`execute` calls the processor in the surroundings that it expects."""

    def __init__(
        self,
        claims: ClaimStore,
        clock: Clock,
        registry: Registry,
        outcome_rules: OutcomeRules,
        execute: Execute,
        transaction_of: UnitOf,
        keeps_time_limits: bool,
        lease: LeaseOf,
    ) -> None:
        self._claims = claims
        self._clock = clock
        self._registry = registry
        self._outcome_rules = outcome_rules
        self._execute = execute
        self._unit_of = transaction_of
        #: Else rows whose tag has time limits are left to processes that can.
        self._keeps_time_limits = keeps_time_limits
        self._lease = lease
        #: With nobody watching, a row pays a test for it.
        self.watcher: Watcher | None = None

    def run(
        self, processor: Processor | None, tasks: Sequence[DelayTask], claimed: datetime
    ) -> list[Settlement]:
        """One task, or as many of the tag as its processor takes at once."""
        if processor is None:
            return [
                self._defer(self._outcome_rules.no_processor(task, self._registry), claimed)
                for task in tasks
            ]
        if any(map(self._outcome_rules.lacks_key, tasks)):
            return self._run_readable(processor, tasks, claimed)
        if processor.has_time_limits and not self._keeps_time_limits:
            return [
                self._too_late(processor, task, claimed)
                or self._defer(self._outcome_rules.no_time_limits(task), claimed)
                for task in tasks
            ]
        if processor.batch is None:
            task = tasks[0]
            late = self._outcome_rules.too_late(processor, task)
            return [
                self._run_one(processor, task, claimed)
                if late is None
                else self._put_aside(late, claimed)
            ]
        return self._run_batch(processor, tasks, claimed)

    def failed(
        self, processor: Processor, tasks: Sequence[DelayTask], error: BaseException
    ) -> list[Settlement]:
        """The ends of tasks whose run had none."""
        began = self._clock.now()
        return [self._outcome_rules.of_error(processor, task, began, error) for task in tasks]

    def _run_readable(
        self, processor: Processor, tasks: Sequence[DelayTask], claimed: datetime
    ) -> list[Settlement]:
        """Those of them whose body can be read; the others wait for a worker that has their key."""
        ends, readable = list[Settlement](), list[DelayTask]()
        for task in tasks:
            if not self._outcome_rules.lacks_key(task):
                readable.append(task)
            else:
                late = self._too_late(processor, task, claimed)
                ends.append(late or self._defer(self._outcome_rules.no_key(task), claimed))
        return ends + (self.run(processor, readable, claimed) if readable else [])

    def _run_one(self, processor: Processor, task: DelayTask, claimed: datetime) -> Settlement:
        began, watcher = self._clock.now(), self.watcher
        if watcher is not None:
            watcher.started(task, claimed, began)
        run = TaskRun(task, self._claims, self._unit_of, self._lease)

        def end(value: object, error: BaseException | None) -> Sequence[Ended]:
            return [self._end(processor, run, began, value, error, watcher)]

        return self._call(processor, task, run, end)[0].settlement

    def _run_batch(
        self, processor: Processor, tasks: Sequence[DelayTask], claimed: datetime
    ) -> list[Settlement]:
        began, watcher, ends = self._clock.now(), self.watcher, list[Settlement]()
        runs: list[TaskRun] = []
        bodies: list[Any] = []
        for task in tasks:
            late = self._too_late(processor, task, claimed)
            if late is not None:
                ends.append(late)
                continue
            if watcher is not None:
                watcher.started(task, claimed, began)
            run = TaskRun(task, self._claims, self._unit_of, self._lease)
            try:
                bodies.append(processor.given(task.body))
            except Exception as error:  # its neighbours must not suffer
                ends += self._run_together(
                    processor, [run], Batch(processor, [task], [], error), began
                )
            else:
                runs.append(run)
        if runs:
            ends += self._run_together(
                processor, runs, Batch(processor, [run.task for run in runs], bodies), began
            )
        return ends

    def _run_together(
        self, processor: Processor, runs: Sequence[TaskRun], batch: Batch, began: datetime
    ) -> list[Settlement]:
        watcher = self.watcher

        def end(value: object, error: BaseException | None) -> Sequence[Ended]:
            values: list[object] = [None] * len(runs)
            if error is None:
                try:
                    values = outcomes_of(value, batch.tasks)
                except InvalidOutcomesError as refusal:
                    error = refusal
            pairs = zip(runs, values, strict=True)
            return [self._end(processor, run, began, one, error, watcher) for run, one in pairs]

        return [ended.settlement for ended in self._call(batch, batch.tasks[0], Runs(runs), end)]

    def _call(self, work: Work, task: DelayTask, run: Current, end: End) -> list[Ended]:
        ends: list[Ended] = []

        def end_all(value: object, error: BaseException | None) -> Sequence[Ended]:
            ends.extend(end(value, error))
            return ends

        token = current_run.set(run)
        try:
            self._execute(work, task, end_all)
        except BaseException as error:
            if ends_process(error):
                raise
            if not ends:
                end_all(None, error)
            else:
                logger.exception(
                    "delaytasks: an error after the end of task %s (tag %r)", task.id, task.tag
                )
        finally:
            current_run.reset(token)
        return ends

    def _end(
        self,
        processor: Processor,
        run: TaskRun,
        began: datetime,
        value: object,
        error: BaseException | None,
        watcher: Watcher | None,
    ) -> Ended:
        ending = None
        if error is None:
            try:
                if run.is_rolled_back:
                    ending = self._outcome_rules.of_rolled_back(processor, run.task, began, value)
                elif run.is_written:
                    ending = self._outcome_rules.of_completed(run, began, None)
                else:
                    ending = self._outcome_rules.of_value(processor, run.task, began, value)
            except Exception as raised:
                error = raised
        if ending is None and error is not None:
            if run.is_certain or run.is_left_open:
                ending = self._outcome_rules.of_completed(run, began, error)
            else:  # if its commit came through nonetheless, what we make of the row is refused
                ending = self._outcome_rules.of_error(processor, run.task, began, error)
        assert ending is not None
        if watcher is not None:
            watcher.ended(ending, self._clock.now(), error)
        return Ended(ending, value, error)

    def _too_late(
        self, processor: Processor, task: DelayTask, claimed: datetime
    ) -> Settlement | None:
        late = self._outcome_rules.too_late(processor, task)
        return None if late is None else self._put_aside(late, claimed)

    def _put_aside(self, late: Settlement, claimed: datetime) -> Settlement:
        if self.watcher is not None:
            self.watcher.expired(late, claimed)
        return late

    def _defer(self, ending: Settlement, claimed: datetime) -> Settlement:
        if self.watcher is not None:
            self.watcher.defer(ending.task, claimed, ending.error or "")
        return ending
