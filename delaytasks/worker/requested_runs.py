"""Runs that were asked to stop, as the processes of a worker see them, and their interruption."""

from __future__ import annotations

import mmap
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delaytasks.core.cancel_request import INTERRUPT
from delaytasks.core.errors import TaskCancelledError

if TYPE_CHECKING:
    from delaytasks.execution.processor_call import ProcessorCall
    from delaytasks.storage.cancel_requests import RequestedRow

#: The most rows of a worker that are asked to stop at the same time.
MOST_ROWS = 1000
#: Sent to a process of the pool whose task is to be interrupted. Celery does not use it there.
SIGNAL = signal.SIGUSR2


class RequestedRuns:
    """The runs of this worker that were asked to stop, by id and version.

    The main process writes them to memory that its children share. Each number is written as a
    whole, and the count last.
    """

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 8 * (1 + 3 * MOST_ROWS))).cast("q")

    def record(self, rows: Sequence[RequestedRow]) -> None:
        """Replace the rows."""
        memory = self._memory
        memory[0] = 0
        for number, row in enumerate(rows[:MOST_ROWS]):
            memory[1 + 3 * number], memory[2 + 3 * number] = row.id, row.version
            memory[3 + 3 * number] = row.request
        memory[0] = min(len(rows), MOST_ROWS)

    def of(self, id: int, version: int) -> int | None:
        """Return the request for this run, or None."""
        memory = self._memory
        if not memory[0]:  # as nearly always
            return None
        for at in range(1, 1 + 3 * memory[0], 3):
            if memory[at] == id and memory[at + 1] == version:
                return int(memory[at + 2])
        return None


class Interrupts:
    """Interrupts the processor that runs in the main thread of a pool process.

    Without `install`, and in other threads, `during` has no effect.
    """

    def __init__(self) -> None:
        self._call: ProcessorCall | None = None
        #: The thread that the signal interrupts.
        self._thread: int | None = None

    def install(self) -> None:
        """Handle the signal from now on. Only a main thread can do this."""
        if self._thread is None and threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._interrupt)
            self._thread = threading.get_ident()

    def during(self, call: ProcessorCall) -> Interrupts:
        """Return a context in which the signal may interrupt this call."""
        if threading.get_ident() == self._thread:
            self._call = call
            self._interrupt()  # the signal may have come before
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self._call = None

    def stop(self) -> None:
        """Interrupt nothing until the next call. An exception may have kept `__exit__` from it."""
        self._call = None

    def _interrupt(self, *_: Any) -> None:
        call = self._call
        for run in () if call is None else call.runs:
            if run.cancel_request == INTERRUPT:
                self._call = None  # so that a signal that comes late interrupts nothing else
                raise TaskCancelledError(
                    f"task {run.task.id} ({run.task.tag}) was cancelled", run.task.id
                )
