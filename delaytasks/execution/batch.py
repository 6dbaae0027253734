"""Tasks of one tag that their processor gets together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from delaytasks.core.errors import InvalidOutcomesError, NotRunningError
from delaytasks.core.outcomes import Outcome
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown
from delaytasks.execution.task_run import TaskRun
from delaytasks.processors.registry import Processor

_OUTCOMES = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Batch:
    """Called in a processor's place, for many tasks at once."""

    processor: Processor
    tasks: Sequence[DelayTask]
    bodies: Sequence[Any]
    #: Why the processor can not be called: its one task has no body that it could be given.
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
        return (
            self.processor.call(bodies, tasks)
            if self.processor.wants_task
            else self.processor.call(tasks)
        )


#: What is called for a task.
Work = Processor | Batch


class Runs:
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
                f"task {id} does not run here: it is none of this batch's {len(self._runs)}", id
            )
        return run


def outcomes_of(value: object, tasks: Sequence[DelayTask]) -> list[object]:
    """For each task what its batch's processor returned: a list says it in their order, a mapping for those that it
    names by their ids, a single outcome for all of them. Who says nothing means success."""
    if value is None or isinstance(value, _OUTCOMES):
        return [value] * len(tasks)
    if isinstance(value, Mapping):
        strangers = value.keys() - {task.id for task in tasks}
        if strangers:
            raise InvalidOutcomesError(
                f"the batch's processor returned outcomes for {len(strangers)} ids of none of its tasks, such as "
                f"{shown(next(iter(strangers)))}: the keys are task.id"
            )
        return [value.get(task.id) for task in tasks]
    if not isinstance(value, (list, tuple)):
        raise InvalidOutcomesError(
            f"the batch's processor returned a {type(value).__name__}: it is None, a list with an outcome for each "
            "task, or a dict of outcomes by task.id"
        )
    if len(value) != len(tasks):
        raise InvalidOutcomesError(
            f"the batch's processor returned {len(value)} outcomes for {len(tasks)} tasks: one for each, in their "
            "order, or a dict of outcomes by task.id"
        )
    return list(value)
