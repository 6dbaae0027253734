"""What crosses into the pool's processes."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from celery import current_app

from delaytasks.core.errors import StoreError
from delaytasks.core.events import log_event
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Stamp
from delaytasks.execution.runner import Report, Runner
from delaytasks.timers.eta import RUN
from delaytasks.worker.chunk_counts import Counting


class Job(NamedTuple):
    """A chunk of one shard: entries that fell due, or (`drain`) a queue whose oldest rows are to be claimed, or
    (`line`) the queue and the tag of those who wait in line."""

    entries: tuple[Entry, ...]
    drain: str | None = None
    priorities: tuple[int, ...] = ()
    limit: int = 0
    events: bool = False
    shard: int = 0
    #: The stamp of the shard's policies; none if the main process has read none yet.
    policies: Stamp | None = Stamp()
    line: tuple[str, str] | None = None
    #: Others go on with the line: take what may start now, and come back.
    is_look: bool = False
    #: How long it may go on with lines.
    for_s: float = 0.0
    #: Whether to tell what became of the tasks.
    counts: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Entries travel as plain tuples, which take the main process a seventh of the time."""
        return _arrived, (tuple(map(tuple, self.entries)), *self[1:])


def _arrived(entries: tuple[Any, ...], *others: Any) -> Job:
    return Job(tuple(map(Entry._make, entries)), *others)


def run_job(job: Job) -> Report:
    """In a pool process, thread, or inline; the current app is the worker's. A failure is returned as text, since
    not every pool tells of exceptions."""
    runner: Runner | None = None
    counting: Counting | None = None
    report: Report
    try:
        delays = current_app.tasks[RUN].delays
        counting = delays.processes.counting() if job.counts else None
        delays.shards[job.shard].policies.follow(job.policies)
        runner = delays.runner(job.shard, job.events)
        if job.line is not None:
            report = runner.work_off(*job.line, job.limit, job.for_s)
        elif job.drain is not None:
            report = runner.drain(job.drain, job.priorities, job.limit, job.for_s)
        else:
            report = runner.run(job.entries, job.for_s)
    except Exception as error:
        # Not as an event, which would be counted twice where the main process runs the chunk.
        log_event("chunk.failed", {"shard": job.shard, "error": error})
        text = f"{type(error).__name__}: {error}"
        left = runner.left if runner is not None else ()
        report = Report(
            pid=os.getpid(), left=left, error=text, is_stores_error=isinstance(error, StoreError)
        )
    return report._replace(counts=counting.take()) if counting is not None else report
