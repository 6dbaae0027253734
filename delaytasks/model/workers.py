"""A worker: its row in the registry."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from itertools import islice
from shlex import quote
from typing import Any, NamedTuple

from delaytasks.model.clock import json_fields
from delaytasks.model.inputs import ALL_QUEUES


def serves(queues: Collection[str], queue: str) -> bool:
    """Return whether a worker with these logical queues serves this one."""
    return ALL_QUEUES in queues or queue in queues


class ServiceTimes(NamedTuple):
    """For how long a worker has been without the services around it, in seconds."""

    #: Since it lost its broker; None while it is connected, and if it uses no broker.
    broker_down_s: float | None = None
    #: Since its timer accepts no tasks; None while it does.
    timer_down_s: float | None = None
    #: Since beat's last message arrived, or since the worker has waited for the first one. None if
    #: the worker does not read the messages of beat.
    beat_s: float | None = None


NO_OUTAGES = ServiceTimes()
#: The pool names of workers without a broker begin with one of these prefixes: those that poll the
#: table for rows due within the horizon, and those that only drain (`delaytasks run`).
POLLING_PREFIX, ONLY_DRAINING_PREFIX = "direct/", "drain/"
#: The pool whose tasks run in other processes than the one that reports the worker.
PREFORK = "prefork"


#: Names in one sentence or command.
MOST_NAMES = 5


class RegisteredWorker(NamedTuple):
    name: str
    #: Whether it has reported recently. A report from the future was not written by a live worker.
    is_alive: bool
    #: Seconds since its last report.
    age_s: float
    queues: Sequence[str]
    #: The tags for which it has processors; None if the worker has not published its tags.
    tags: frozenset[str] | None
    pool: str
    concurrency: int
    started_at: datetime
    seen_at: datetime
    #: How far the clock of its machine is ahead of the clock of the database.
    clock_offset_s: float
    services: ServiceTimes = NO_OUTAGES
    #: How many of its processes had a chunk when it last reported, and its version of delaytasks;
    #: None if only workers of an earlier version have reported by this name.
    busy: int | None = None
    version: str | None = None

    def serves(self, queue: str) -> bool:
        return serves(self.queues, queue)

    @property
    def up_s(self) -> float:
        """Seconds since its start."""
        return (self.seen_at - self.started_at).total_seconds() + self.age_s


class LostWorker(NamedTuple):
    """A worker that ended without signing off: it was killed, or its host is down."""

    name: str
    #: When a sweep found that the worker no longer reports.
    lost_at: datetime
    #: When the worker reported for the last time.
    seen_at: datetime
    pool: str
    concurrency: int
    queues: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return json_fields(self._asdict())


def one_more_worker(queues: Collection[str], namespace: str) -> str:
    """Return the remedy for queues that no worker serves, while other workers run.

    With -Q a worker serves no other queues, not even those of the app's own tasks.
    """
    names = quote(",".join(f"{namespace}.{queue}" for queue in islice(queues, MOST_NAMES)))
    return f"Start one more worker: celery -A … worker -Q {names}"
