"""Runs the rows of processors with `in_flight` in threads, beyond the runner's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial

from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.execution.chunk import Chunk
from delaytasks.execution.executor import TaskExecutor
from delaytasks.processors.registry import ProcessorSpec
from delaytasks.processors.thread_slots import ThreadSlots


class ConcurrentCalls:
    """`on_end` gets a chunk in which a call has ended, `on_error` an error outside of a task."""

    def __init__(
        self,
        thread_slots: ThreadSlots,
        executor: TaskExecutor,
        on_end: Callable[[Chunk], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._thread_slots = thread_slots
        self._executor = executor
        self._on_end = on_end
        self._on_error = on_error

    def free_rows(self, processor: ProcessorSpec) -> int:
        """Return how many rows could start now."""
        return self._free_slots(processor) * (processor.batch or 1)

    def start(
        self, chunk: Chunk, processor: ProcessorSpec, first: DelayTask, claimed: datetime
    ) -> int | None:
        """Start the row `first` with further rows of its batch, and return their number.

        Returns None if no slot became free within the chunk's time budget.
        """
        tag, slots, thread_slots = processor.tag, processor.in_flight or 1, self._thread_slots
        if not thread_slots.take(tag, slots, chunk.budget_ends):
            return None
        tasks = chunk.start(first, processor.batch or 1)
        if tasks:
            call = partial(self._call, processor, tasks, claimed)
            thread_slots.start(tag, slots, len(tasks), call, partial(self._ended, chunk, tasks))
        else:
            thread_slots.give_back(tag)
        return len(tasks)

    def wait(
        self, chunk: Chunk, processors: Iterable[ProcessorSpec], may_detach_s: float | None
    ) -> None:
        """Wait until all rows of the chunk have ended.

        With `may_detach_s`, wait no longer than the time budget, and then until another chunk has
        free slots: half of them for `may_detach_s`, since it would otherwise get only a few rows,
        and then any.
        """

        def is_done() -> bool:
            return chunk.is_done

        def has_free_slots(share: float = 0.0) -> bool:
            return chunk.is_done or all(
                self._free_slots(p) >= max(share * (p.in_flight or 1), 1) for p in processors
            )

        thread_slots, budget_ends = self._thread_slots, chunk.budget_ends
        if may_detach_s is None:
            thread_slots.wait(is_done)
        elif not thread_slots.wait(is_done, budget_ends) and not thread_slots.wait(
            lambda: has_free_slots(0.5), budget_ends + may_detach_s
        ):
            thread_slots.wait(has_free_slots)

    def _free_slots(self, processor: ProcessorSpec) -> int:
        return self._thread_slots.free(processor.tag, processor.in_flight or 1)

    def _call(
        self, processor: ProcessorSpec, tasks: Sequence[DelayTask], claimed: datetime
    ) -> list[Settlement]:
        """Run the tasks in this thread, which has no caller that an exception could reach."""
        try:
            return self._executor.run(processor, tasks, claimed)
        except BaseException as error:
            try:
                return self._executor.failed(processor, tasks, error)
            except Exception as worse:
                self._on_error(worse)
                return []

    def _ended(
        self, chunk: Chunk, tasks: Sequence[DelayTask], settlements: Sequence[Settlement]
    ) -> None:
        try:
            chunk.end(settlements)
            chunk.forget(tasks)  # a row without a settlement is abandoned
            self._on_end(chunk)
        except Exception as error:
            self._on_error(error)
