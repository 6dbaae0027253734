"""The time limits of processors, kept by the process that runs the task.

They count from the start of the processor, and they apply while it runs C code or keeps the GIL.

A soft limit is the signal of a timer, which raises in the processor. A hard limit is a native
thread of `faulthandler`, which does not need the interpreter: it writes to stderr where each thread
is, and ends the process. The worker's main process sees this, and the rows are recovered.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from delaytasks.model.errors import ConfigError

if TYPE_CHECKING:
    from delaytasks.db.producer import QueueRouting
    from delaytasks.registry import ProcessorSpec, Registry

T = TypeVar("T")
#: The file descriptor, which is stderr even if `sys.stderr` is redirected.
STDERR = 2


def can_limit_time(pool: Any) -> bool:
    """Return whether this is a prefork pool.

    Signals reach only the main thread of a process, and a process that ends must have no other
    tasks.
    """
    from celery.concurrency import prefork  # loaded in workers, and other processes do not need it

    return isinstance(pool, prefork.TaskPool)


def check_time_limits(
    registry: Registry, queue_routing: QueueRouting, served: Collection[str], pool: Any
) -> None:
    """Raise `ConfigError` if the pool cannot keep the limits of a tag whose queue is served."""
    if can_limit_time(pool):
        return
    limited_tags = [processor.tag for processor in registry if processor.has_time_limits]
    for tag in sorted(limited_tags):
        queue = queue_routing.of(tag)
        if queue in served:
            name = type(pool).__module__.rpartition(".")[2]
            raise ConfigError(
                f"the tag {tag!r} has time limits, which the pool {name!r} cannot keep: start this "
                f"worker with -P prefork, or let it serve (-Q) other queues than {queue!r}"
            )


def limited(processor: ProcessorSpec, call: Callable[[], T]) -> T:
    """Call a processor within its limits.

    Both limits must be disarmed, even if the soft one strikes at the last moment. So each one has a
    `finally` of its own, and the soft one is the inner one.
    """
    soft = partial(_soft_limited, processor.soft_time_limit_s, call)
    if processor.time_limit_s is None:
        return soft()
    faulthandler.dump_traceback_later(processor.time_limit_s, exit=True, file=STDERR)
    try:
        return soft()
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
        # A limit that struck before this statement raises here at the latest.
        signal.signal(signal.SIGALRM, before)
