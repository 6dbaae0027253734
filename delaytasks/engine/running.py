"""How one row is run: its processor called, and its end made of what that returned or raised."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from delaytasks.core.clock import Clock
from delaytasks.core.current import current_run
from delaytasks.core.ports import ClaimStore, Settlement
from delaytasks.core.task import DelayTask
from delaytasks.engine.endings import Endings
from delaytasks.engine.registry import Processor, Registry
from delaytasks.engine.run import Run, UnitOf

Execute = Callable[[Processor, DelayTask], Any]
_EXITS = (SystemExit, KeyboardInterrupt)


class Watcher(Protocol):
    """Sees every row's run, and is told when to pass on what it saw. It must not raise."""

    def started(self, task: DelayTask, claimed: datetime, began: datetime) -> None: ...
    def ended(self, ending: Settlement, ended: datetime, error: BaseException | None) -> None: ...
    def expired(self, ending: Settlement, claimed: datetime) -> None: ...
    def put_off(self, task: DelayTask, claimed: datetime, why: str) -> None: ...
    def flush(self) -> None: ...


class Running:
    """`execute` calls the processor in the surroundings that it expects."""

    def __init__(
        self,
        claims: ClaimStore,
        clock: Clock,
        registry: Registry,
        endings: Endings,
        execute: Execute,
        unit_of: UnitOf,
        keeps_time_limits: bool,
    ) -> None:
        self._claims = claims
        self._clock = clock
        self._registry = registry
        self._endings = endings
        self._execute = execute
        self._unit_of = unit_of
        #: Else rows whose tag has time limits are left to processes that can.
        self._keeps_time_limits = keeps_time_limits
        #: With nobody watching, a row pays a test for it.
        self.watcher: Watcher | None = None

    def run(self, task: DelayTask, claimed: datetime) -> Settlement:
        processor, watcher = self._registry.get(task.tag), self.watcher
        if processor is None:
            return self._put_off(self._endings.no_processor(task, self._registry), claimed)
        late = self._endings.too_late(processor, task)
        if late is not None:
            if watcher is not None:
                watcher.expired(late, claimed)
            return late
        if processor.has_time_limits and not self._keeps_time_limits:
            return self._put_off(self._endings.no_time_limits(task), claimed)
        began, error = self._clock.now(), None
        if watcher is not None:
            watcher.started(task, claimed, began)
        run = Run(task, self._claims, self._unit_of)
        token = current_run.set(run)
        try:
            value = self._execute(processor, task)
            if run.is_written:
                ending = self._endings.of_completed(run, began, None)
            else:
                ending = self._endings.of_value(processor, task, began, value)
        except BaseException as raised:
            if isinstance(raised, _EXITS) and type(raised) not in _EXITS:
                raise  # Celery's WorkerShutdown and WorkerTerminate
            error = raised
            if run.is_certain or run.is_left_open:
                ending = self._endings.of_completed(run, began, error)
            else:  # if its commit came through nonetheless, what we make of the row is refused
                ending = self._endings.of_error(processor, task, began, error)
        finally:
            current_run.reset(token)
        if watcher is not None:
            watcher.ended(ending, self._clock.now(), error)
        return ending

    def _put_off(self, ending: Settlement, claimed: datetime) -> Settlement:
        if self.watcher is not None:
            self.watcher.put_off(ending.task, claimed, ending.error or "")
        return ending
