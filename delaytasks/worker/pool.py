"""Celery's pool, as far as chunks are concerned: how many it takes, what it has, and what it was made to forget."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from delaytasks.worker.celery_compat.versions import mark_busy
from delaytasks.worker.job import Job, run_job


class Sent(NamedTuple):
    job: Job
    #: The pool's word for it; none if it takes no more work.
    answer: Any
    #: The pool's processes at that time.
    pids: frozenset[int]

    @property
    def is_forgotten(self) -> bool:
        """When a worker loses the broker, and when it stops, Celery makes its prefork pool forget every job that no
        process has confirmed: it takes them for messages that come back by themselves. Some have arrived in their
        process all the same."""
        books = getattr(self.answer, "_cache", None)
        # Asked in this order: a job that ends meanwhile is ready before it leaves the books.
        return books is not None and self.answer._job not in books and not self.answer.ready()

    def remember(self) -> bool:
        """Puts it back into the pool's books; False if no process has it. Of a process that is younger than it the
        pool says that it has whatever its predecessor had, who died."""
        if self.process is None:
            return False
        self.answer._cache[self.answer._job] = self.answer
        return True

    @property
    def process(self) -> Any:
        """The process of a prefork pool that has it, or None."""
        process = getattr(self.answer, "_write_to", None)
        return (
            process
            if process is not None and process.pid in self.pids and process._is_alive()
            else None
        )


class Pool:
    """May be used from one thread only, the event loop's where there is one."""

    def __init__(self, celerys: Any) -> None:
        self._celerys = celerys
        #: What is in it, by number.
        self.sent: dict[int, Sent] = {}

    @property
    def size(self) -> int:
        """How many chunks it runs at once."""
        return int(getattr(self._celerys, "num_processes", None) or self._celerys.limit or 1)

    def send(self, job: Job, done: Callable[[Any], None], lost: Callable[[Any], None]) -> Sent:
        """A solo pool runs it at once, and others may be done with it when this returns."""
        pids = self._processes()
        return Sent(
            job,
            self._celerys.apply_async(run_job, args=(job,), callback=done, error_callback=lost),
            pids,
        )

    def _processes(self) -> frozenset[int]:
        """Those of a prefork pool; other pools have none of their own."""
        return frozenset(
            process.pid for process in getattr(getattr(self._celerys, "_pool", None), "_pool", ())
        )

    def end_process(self, pid: int) -> bool:
        """Ends one of the pool's processes, which the pool then replaces; False if it has no such process. SIGKILL,
        since a process that is broken may not be able to end by itself."""
        if pid not in self._processes():
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return True

    def pid_of(self, number: int) -> int:
        """The process that has this job; 0 if nobody knows."""
        sent = self.sent.get(number)
        pids: Sequence[int] = (
            getattr(sent.answer, "worker_pids", tuple)() if sent is not None else ()
        )
        return next(iter(pids), 0)

    def pids(self) -> set[int]:
        """The processes that have chunks, as far as it says."""
        answers = [sent.answer for sent in list(self.sent.values())]
        return {pid for answer in answers for pid in getattr(answer, "worker_pids", tuple)() if pid}

    def recall(self) -> list[tuple[int, Job]]:
        """Remembers what it has forgotten and a process has all the same: else those hold their places for good, and a
        process that ends waits half a minute for somebody to hear it. Returns those that no process has."""
        forgotten = [(number, sent) for number, sent in self.sent.items() if sent.is_forgotten]
        nobodys = [(number, sent.job) for number, sent in forgotten if not sent.remember()]
        mark_busy(
            self._celerys, [sent.process for sent in self.sent.values() if sent.process is not None]
        )
        return nobodys
