"""The chunk that the main process sends to a process of the pool, and the function that runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from celery import current_app

from delaytasks.events import log_event
from delaytasks.model.policies import Stamp
from delaytasks.model.task import Entry
from delaytasks.run.runner import FailureReason, Report, Runner
from delaytasks.worker.celery_tasks import processes_of
from delaytasks.worker.processes import Processes


class ChunkRequest(NamedTuple):
    """A chunk: due entries, or a queue to drain, or a waitlist to serve."""

    entries: tuple[Entry, ...]
    #: The queue whose oldest overdue rows are claimed, and the priorities of these rows.
    drained_queue: str | None = None
    priorities: tuple[int, ...] = ()
    #: How many rows the chunk may claim.
    limit: int = 0
    sends_events: bool = False
    #: Distinguishes the chunks of a worker.
    number: int = 0
    #: The stamp of the policies, or None if the main process has read none yet.
    policies: Stamp | None = Stamp()
    #: The queue and the tag of a waitlist.
    waitlist: tuple[str, str] | None = None
    #: Other processes serve the waitlist: start what may start now, and return.
    is_probe: bool = False
    #: How long the process may continue with waitlists.
    serve_s: float = 0.0
    #: How long the process may continue with further chunks of a drain.
    continue_s: float = 0.0
    #: Whether the report should count the outcomes of the tasks.
    counts_outcomes: bool = False

    def work(self, runner: Runner) -> Callable[[], Report]:
        """Return the call that runs the chunk, which is no frame of its own in a traceback."""
        if self.waitlist is not None:
            return partial(runner.run_waitlist, *self.waitlist, self.limit, self.serve_s)
        if self.drained_queue is None:
            return partial(runner.run, self.entries, self.serve_s)
        limits = self.limit, self.serve_s, self.continue_s
        return partial(runner.run_due, self.drained_queue, self.priorities, *limits)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle entries as plain tuples, which takes the main process a seventh of the time."""
        return _unpickle, (tuple(map(tuple, self.entries)), *self[1:])


def _unpickle(entries: tuple[Any, ...], *others: Any) -> ChunkRequest:
    return ChunkRequest(tuple(map(Entry._make, entries)), *others)


def run_chunk(request: ChunkRequest) -> Report:
    """Run a chunk in a pool process, in a thread, or inline. The current app is the worker's.

    A failure is returned as text, since not every pool reports exceptions.
    """
    runner: Runner | None = None
    report: Report
    processes: Processes | None = None
    try:
        processes = processes_of(current_app)
        if request.counts_outcomes:
            processes.count_outcomes()
        policies = processes.runtime.policy_cache
        # While the process continues with a drain, the main process sends it no further stamps.
        is_led = request.continue_s == 0
        policies.follow(request.policies, is_led)
        runner = processes.runner(request.sends_events)
        report = request.work(runner)()
    except Exception as error:
        # Not as an event, which would be counted twice if the main process runs the chunk.
        log_event("chunk.failed", {"error": error})
        text = f"{type(error).__name__}: {error}"
        detached = runner.detached if runner is not None else ()
        report = Report(
            pid=os.getpid(), detached=detached, error=text, reason=FailureReason.of(error)
        )
    if not request.counts_outcomes or processes is None:
        return report
    return report._replace(counts=processes.take_counts())
