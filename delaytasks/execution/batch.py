"""Batches: tasks of one tag that their processor gets in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from delaytasks.core.errors import InvalidOutcomesError, NotRunningError
from delaytasks.core.outcomes import Outcome
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown
from delaytasks.execution.task_run import TaskRun
from delaytasks.processors.event_loop import awaited
from delaytasks.processors.registry import Processor

_OUTCOMES = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Batch:
    """Has the interface of a processor, and calls it for all tasks of the batch."""

    processor: Processor
    tasks: Sequence[DelayTask]
    bodies: Sequence[Any]
    #: Why the processor's schema refused the body of the only task.
    refusal: Exception | None = None

    @property
    def tag(self) -> str:
        return self.processor.tag

    @property
    def function(self) -> Callable[..., Any]:
        return self.processor.function

    @property
    def has_time_limits(self) -> bool:
        return self.processor.has_time_limits

    @property
    def soft_time_limit_s(self) -> float | None:
        return self.processor.soft_time_limit_s

    @property
    def time_limit_s(self) -> float | None:
        return self.processor.time_limit_s

    def body_of(self, first: DelayTask) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return list(self.bodies)

    def __call__(self, first: DelayTask, bodies: list[Any]) -> Any:
        tasks = list(self.tasks)
        if self.processor.wants_task:
            return awaited(self.processor.function(bodies, tasks))
        return awaited(self.processor.function(tasks))


#: A processor, or a batch in its place.
Work = Processor | Batch


class BatchRun:
    """The runs of a batch, each of which its processor may complete."""

    def __init__(self, runs: Sequence[TaskRun]) -> None:
        self._runs = {run.task.id: run for run in runs}

    def complete(self, id: int, session: Any, result: Any) -> None:
        self._run(id).complete(id, session, result)

    def check_lease(self, id: int) -> None:
        self._run(id).check_lease(id)

    def _run(self, id: int) -> TaskRun:
        run = self._runs.get(id)
        if run is None:
            raise NotRunningError(
                f"task {id} does not run here: it is not in this batch of {len(self._runs)}", id
            )
        return run


def outcomes_of(value: object, tasks: Sequence[DelayTask]) -> list[object]:
    """Return the outcome of each task from what the batch's processor returned.

    A list has the outcomes in the order of the tasks, a mapping has them by id, and a single
    outcome is for all tasks. A task without an outcome has succeeded.
    """
    if value is None or isinstance(value, _OUTCOMES):
        return [value] * len(tasks)
    if isinstance(value, Mapping):
        unknown = value.keys() - {task.id for task in tasks}
        if unknown:
            raise InvalidOutcomesError(
                f"the batch's processor returned outcomes for {len(unknown)} ids that are not in "
                f"the batch, such as {shown(next(iter(unknown)))}: the keys are task.id"
            )
        return [value.get(task.id) for task in tasks]
    if not isinstance(value, (list, tuple)):
        raise InvalidOutcomesError(
            f"the batch's processor returned a {type(value).__name__}: it is None, a list with an "
            "outcome for each task, or a dict of outcomes by task.id"
        )
    if len(value) != len(tasks):
        raise InvalidOutcomesError(
            f"the batch's processor returned {len(value)} outcomes for {len(tasks)} tasks: one for "
            "each, in their order, or a dict of outcomes by task.id"
        )
    return list(value)
