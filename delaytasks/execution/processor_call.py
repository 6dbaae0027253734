"""One call of a processor, for one task or for a batch of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from delaytasks.core.errors import InvalidOutcomesError, NotRunningError
from delaytasks.core.task import DelayTask, Outcome
from delaytasks.core.text import count, shown
from delaytasks.execution.task_run import TaskRun
from delaytasks.processors.event_loop import awaited
from delaytasks.processors.registry import ProcessorSpec

_OUTCOMES = get_args(Outcome)


class ProcessorCall:
    """While it runs, `task.complete` and `task.check_lease` reach its runs through it."""

    __slots__ = ("_bodies", "_refusal", "processor", "runs")

    def __init__(
        self,
        processor: ProcessorSpec,
        runs: Sequence[TaskRun],
        bodies: Sequence[Any] = (),
        refusal: Exception | None = None,
    ) -> None:
        self.processor = processor
        #: One run, or those of a batch.
        self.runs = runs
        #: The bodies of a batch, as the processor's schema made them.
        self._bodies = bodies
        #: Why the only body of a batch cannot be read.
        self._refusal = refusal

    @property
    def task(self) -> DelayTask:
        """The task, or the first one of a batch."""
        return self.runs[0].task

    def read_argument(self) -> Any:
        """Return the body, or the bodies of a batch; raise an error if it cannot be read."""
        if self._refusal is not None:
            raise self._refusal
        return (
            self.processor.body_of(self.task)
            if self.processor.batch is None
            else list(self._bodies)
        )

    def __call__(self, argument: Any) -> Any:
        """Call the user's function with what `read_argument` returned."""
        processor, function = self.processor, self.processor.function
        if processor.batch is None:
            body = processor.checked(argument)
            return awaited(function(body, self.task) if processor.wants_task else function(body))
        tasks = [run.task for run in self.runs]
        return awaited(function(argument, tasks) if processor.wants_task else function(tasks))

    def outcomes(self, value: object) -> list[object]:
        """Return the outcome of each run from what the function returned."""
        if self.processor.batch is None:
            return [value]
        return _outcomes_of_batch(value, [run.task.id for run in self.runs])

    def complete(self, id: int, session: Any, result: Any) -> None:
        self._run(id).complete(session, result)

    def check_lease(self, id: int) -> None:
        self._run(id).check_lease()

    def is_cancelled(self, id: int) -> bool:
        return any(run.task.id == id and run.is_asked_to_stop for run in self.runs)

    def _run(self, id: int) -> TaskRun:
        for run in self.runs:
            if run.task.id == id:
                return run
        ids = [run.task.id for run in self.runs]
        raise NotRunningError(f"task {id} does not run here: this call is for {shown(ids)}", id)


def _outcomes_of_batch(value: object, ids: Sequence[int]) -> list[object]:
    """Return the outcome of each task from what the processor of a batch returned.

    A list has the outcomes in the order of the tasks, a mapping has them by id, and a single
    outcome is for all tasks. A task without an outcome has succeeded.
    """
    if value is None or isinstance(value, _OUTCOMES):
        return [value] * len(ids)
    if isinstance(value, Mapping):
        unknown = value.keys() - set(ids)
        if unknown:
            raise InvalidOutcomesError(
                f"the batch's processor returned outcomes for {count(len(unknown), 'unknown id')}, "
                f"such as {shown(next(iter(unknown)))}: the keys are task.id"
            )
        return [value.get(id) for id in ids]
    if not isinstance(value, (list, tuple)):
        raise InvalidOutcomesError(
            f"the batch's processor returned a {type(value).__name__}: it is None, a list with an "
            "outcome for each task, or a dict of outcomes by task.id"
        )
    if len(value) != len(ids):
        raise InvalidOutcomesError(
            f"the batch's processor returned {count(len(value), 'outcome')} for "
            f"{count(len(ids), 'task')}: return one for each, in their order, or a dict of "
            "outcomes by task.id"
        )
    return list(value)
