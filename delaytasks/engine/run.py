"""One run of one task, which its processor may complete in a transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from delaytasks.core.errors import InvalidScheduleError, LeaseLostError, NotRunningError
from delaytasks.core.inputs import encode_body
from delaytasks.core.ports import ClaimStore, Executor, Unit
from delaytasks.core.task import DelayTask

#: A result is for looking at, not a place to keep data.
MAX_RESULT_BYTES = 16 * 1024
UnitOf = Callable[[Any, DelayTask], Unit | None]


class Run:
    def __init__(self, task: DelayTask, claims: ClaimStore, unit_of: UnitOf) -> None:
        self.task = task
        self._claims = claims
        self._unit_of = unit_of
        #: The row is DONE in a transaction of the processor's.
        self.is_written = False
        #: That transaction is committed, or was about to be.
        self.is_committed = False
        #: Nobody can say of a plain connection that its commit came through.
        self.is_certain = False
        self._on: Executor | None = None

    @property
    def is_left_open(self) -> bool:
        """That transaction goes on, and has the row locked."""
        return not self.is_committed and self._on is not None and self._on.in_transaction()

    @property
    def is_rolled_back(self) -> bool:
        """It was written, and is not there."""
        return self.is_written and not self.is_committed and not self.is_left_open

    def complete(self, id: int, session: Any, result: Any) -> None:
        task = self.task
        if id != task.id:
            raise NotRunningError(f"task {id} does not run here: this is a run of task {task.id}", id)
        kept = None if result is None else encode_body(result, MAX_RESULT_BYTES)
        unit = self._unit_of(session, task)
        if unit is None:
            raise InvalidScheduleError("complete() takes the session that the effect is written in: session=…")
        with unit.guard():
            self._on = unit.executor
            if not self._claims.complete(task, kept, self._on):
                raise LeaseLostError(f"task {id} ({task.tag}) is no longer this run's: roll back what it did", id)
        self.is_written = True
        unit.after_commit([task], self._committed)

    def _committed(self, _tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
        self.is_committed, self.is_certain = True, is_committed
