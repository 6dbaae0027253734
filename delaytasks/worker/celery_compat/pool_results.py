"""The jobs of Celery's pool: which process has one, and which ones the pool has forgotten.

Pools other than prefork have no processes of their own, and their results have few attributes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import Any


def process_ids(celery_pool: Any) -> frozenset[int]:
    """Return the processes of a prefork pool. Other pools have none."""
    processes = getattr(getattr(celery_pool, "_pool", None), "_pool", ())
    return frozenset(process.pid for process in processes)


def running_pids(celery_pool: Any) -> set[int]:
    """Return the processes that run the jobs of a pool: its own ones, or this one."""
    try:
        info = celery_pool.info or {}
    except AttributeError:
        return set()  # a prefork pool that has stopped has no information
    return set(info.get("processes") or [os.getpid()])


def pids_with(result: Any) -> Sequence[int]:
    """Return the process that has reported that it has the job; it is empty if none has."""
    pids: Sequence[int] = getattr(result, "worker_pids", tuple)()
    return pids


def process_with(result: Any, pids: Collection[int]) -> Any:
    """Return the process of a prefork pool that has the job, or None.

    `pids` are the processes that the pool had when the job was sent. The pool assigns the jobs of a
    process that died to its successor, which does not have them. Such a successor is not in `pids`.
    """
    process = getattr(result, "_write_to", None)
    has_it = process is not None and process.pid in pids and process._is_alive()
    return process if has_it else None


def is_forgotten(result: Any) -> bool:
    """Return whether Celery made its prefork pool forget the job.

    When a worker loses the broker, and when it stops, Celery forgets every job that no process has
    confirmed. It takes them for messages that the broker delivers again. Some of these jobs have
    reached a process nevertheless.
    """
    cache = getattr(result, "_cache", None)
    # The order matters: a job that ends meanwhile is ready before it leaves the cache.
    return cache is not None and result._job not in cache and not result.ready()


def put_back(result: Any) -> None:
    """Let the pool read the result of a job that it has forgotten."""
    result._cache[result._job] = result


def without_time_limits(result: Any) -> None:
    """Remove the app's `task_time_limit` from a job that has not begun.

    The setting is for messages. A chunk has many tasks, and the limit would end all of them. A pool
    with such a limit applies it to every job that it accepts.
    """
    if hasattr(result, "_on_timeout_set"):
        result._on_timeout_set = None
        result._timeout = result._soft_timeout = math.inf
