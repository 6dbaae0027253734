"""Calls of a chunk's rows that run side by side: the chunk starts them, waits for them, or goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.execution.chunk import Chunk
from delaytasks.execution.executor import TaskExecutor
from delaytasks.processors.registry import Processor
from delaytasks.processors.thread_slots import ThreadSlots


class ConcurrentCalls:
    """`on_end` hears of a chunk that a call of its has ended, `on_error` of an end that could not be made."""

    def __init__(
        self,
        thread_slots: ThreadSlots,
        running: TaskExecutor,
        on_end: Callable[[Chunk], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._thread_slots = thread_slots
        self._running = running
        self._on_end = on_end
        self._on_error = on_error

    def free_rows(self, processor: Processor) -> int:
        return self._free_places(processor) * (processor.batch or 1)

    def start(
        self, chunk: Chunk, processor: Processor, first: DelayTask, most: int, claimed: datetime
    ) -> int | None:
        """How many rows began with that one; None if there was no place for it within the time box."""
        tag, places, thread_slots = processor.tag, processor.in_flight or 1, self._thread_slots
        if not thread_slots.take(tag, places, chunk.box_ends):
            return None
        tasks = chunk.start(first, most)
        if tasks:
            call = partial(self._call, processor, tasks, claimed)
            thread_slots.start(tag, places, len(tasks), call, partial(self._ended, chunk, tasks))
        else:
            thread_slots.give_back(tag)
        return len(tasks)

    def wait(
        self, chunk: Chunk, processors: Sequence[Processor], may_leave_s: float | None
    ) -> None:
        """Until all have ended; or, so long after the time box, until there are places for another chunk."""

        def is_run() -> bool:
            return chunk.is_run

        def has_room(share: float = 0.0) -> bool:
            return chunk.is_run or all(
                self._free_places(p) >= max(share * (p.in_flight or 1), 1) for p in processors
            )

        thread_slots, box_ends = self._thread_slots, chunk.box_ends
        if may_leave_s is None:
            thread_slots.wait(is_run)
        # Some places are worth a moment's waiting, or the next chunk would be a few rows.
        elif not thread_slots.wait(is_run, box_ends) and not thread_slots.wait(
            lambda: has_room(0.5), box_ends + may_leave_s
        ):
            thread_slots.wait(has_room)

    def _free_places(self, processor: Processor) -> int:
        return self._thread_slots.free(processor.tag, processor.in_flight or 1)

    def _call(
        self, processor: Processor, tasks: Sequence[DelayTask], claimed: datetime
    ) -> list[Settlement]:
        """In a thread of its own."""
        try:
            return self._running.run(processor, tasks, claimed)
        except BaseException as error:  # told to stop: nobody would hear of it here
            try:
                return self._running.failed(processor, tasks, error)
            except Exception as worse:
                self._on_error(worse)
                return []

    def _ended(self, chunk: Chunk, tasks: Sequence[DelayTask], ends: list[Settlement]) -> None:
        chunk.end(ends)
        chunk.forget(tasks)  # what has no end lapses
        self._on_end(chunk)
