"""Time limits of a processor's runs, kept by the pool process itself: they count from the moment the processor begins,
and hold while it sits in C or keeps the interpreter to itself.

A soft limit is a timer's signal, which raises in the processor. A hard one is a native thread of `faulthandler`, which
needs nothing of the interpreter: it writes to stderr where each thread is, and ends the process. The worker's main
process sees it die, and what it held lapses.
"""

from __future__ import annotations

import faulthandler
import math
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from delaytasks.core.errors import ConfigError
from delaytasks.execution.batch import Work

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks

T = TypeVar("T")
#: stderr, whatever Python's may be redirected to.
STDERR = 2


def can_limit_time(pool: Any) -> bool:
    """Signals reach a process's main thread only, and a process that ends must have no other rows: prefork it is."""
    from celery.concurrency import prefork  # a worker has it loaded; others need not

    return isinstance(pool, prefork.TaskPool)


def check_time_limits(delays: DelayTasks, pool: Any) -> None:
    """A worker that can not keep the limits of what waits in its queues does not start."""
    if can_limit_time(pool):
        return
    served = delays.processes.queues
    limited = sorted((p.tag, delays.queues.of(p.tag)) for p in delays.registry if p.has_time_limits)
    for tag, queue in limited:
        if queue in served:
            name = type(pool).__module__.rpartition(".")[2]
            raise ConfigError(
                f"the tag {tag!r} has time limits, which the pool {name!r} can not keep: start this worker with "
                f"-P prefork, or let it serve (-Q) other queues than {queue!r}"
            )


def limited(work: Work, call: Callable[[], T]) -> T:
    """Calls a processor within its limits. What disarms them must not be skipped, even when the soft one strikes
    at the last moment: so each has a `finally` of its own, and the soft one is the inner."""
    if work.time_limit_s is None:
        return _soft_limited(work.soft_time_limit_s, call)
    faulthandler.dump_traceback_later(work.time_limit_s, exit=True, file=STDERR)
    try:
        return _soft_limited(work.soft_time_limit_s, call)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _soft_limited(limit_s: float | None, call: Callable[[], T]) -> T:
    if limit_s is None:
        return call()

    def exceed(*_: Any) -> None:
        raise SoftTimeLimitExceeded(limit_s)

    before = signal.signal(signal.SIGALRM, exceed)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)  # here what struck before is raised at the latest


def without_celerys_limits(result: Any) -> None:
    """The app's `task_time_limit` is for messages, and a chunk is none: it would end all rows of it, wherever they
    are. A pool that has such limits takes no job without them, so they are taken from the job, which has not begun."""
    if hasattr(result, "_on_timeout_set"):
        result._on_timeout_set = None
        result._timeout = result._soft_timeout = math.inf
