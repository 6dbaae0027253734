"""A worker: its row in the registry, the size of its chunks, the last renewal of its leases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from math import inf
from typing import Any, NamedTuple

from delaytasks.model.clock import json_fields
from delaytasks.model.inputs import ALL_QUEUES


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
#: A worker whose outage began within this time after its start has never reached its broker.
CONNECTING_S = 5.0


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
        return ALL_QUEUES in self.queues or queue in self.queues

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


def beat_age_s(workers: Iterable[RegisteredWorker]) -> float | None:
    """Return for how many seconds no message of beat has reached a live worker.

    None if no live worker could receive one: none reads these messages, or none has a broker.
    """
    services = [worker.services for worker in workers if worker.is_alive]
    ages = [each.beat_s for each in services if each.broker_down_s is None]
    return min((age_s for age_s in ages if age_s is not None), default=None)


def broker_down_s(workers: Iterable[RegisteredWorker]) -> float | None:
    """Return for how many seconds no live worker has reached its broker.

    None if a live worker reaches its broker, or none is alive. A worker that started without a
    broker does not know when the outage began, so it counts only if all workers did.
    """
    alive = [worker for worker in workers if worker.is_alive]
    downs = [(worker, worker.services.broker_down_s) for worker in alive]
    known = [(worker, down_s) for worker, down_s in downs if down_s is not None]
    if len(known) < len(alive):
        return None
    lost = [down_s for worker, down_s in known if down_s < worker.up_s - CONNECTING_S]
    return min(lost) if lost else max((down_s for _, down_s in known), default=None)


# -- The number of rows of a chunk ----------------------------------------------------------------


#: Rows of the first chunk, before the speed of the processors is known.
FIRST_SIZE = 10
#: Rows that a process gets before that, so that it stays busy until the first chunks are measured.
FIRST_PREFETCH = 100
#: The weight of the last chunk in the estimate, if it was as small as the first; a larger chunk
#: weighs more.
LEARNING = 0.3
#: The most full chunks in one time budget, since claims and settlements take time as well.
MOST_CHUNKS = 5


class ChunkSize:
    """Estimates from past chunks how many rows fit the time budget."""

    def __init__(self, time_budget_s: float, most: int, first: int = FIRST_SIZE) -> None:
        self._time_budget_s = time_budget_s
        self._most = most
        self._first = first
        self._row_s: float | None = None
        self._wanted = 0

    def learn(self, ran: int, seconds: float, wanted: int = 0) -> None:
        """Learn from a chunk.

        `wanted` is the number of rows that its processors can start simultaneously.
        """
        if ran or wanted:
            self._wanted = min(wanted, self._most)
        if ran:
            row_s = seconds / ran
            known = row_s if self._row_s is None else self._row_s
            self._row_s = known + (1 - (1 - LEARNING) ** max(ran / FIRST_SIZE, 1)) * (row_s - known)

    @property
    def rows(self) -> int:
        return min(self.in_time, self._most)

    @property
    def in_time(self) -> int:
        """The rows that one process runs in a time budget, in several chunks if they are short."""
        fitting = (
            self._first if self._row_s is None else self._time_budget_s / max(self._row_s, 1e-6)
        )
        return int(min(max(fitting, self._wanted, 1), self._most * MOST_CHUNKS))

    @property
    def prefetch(self) -> int:
        """The rows that a process should have at hand."""
        if self._row_s is not None:
            return self.in_time
        return max(self.in_time, min(FIRST_PREFETCH, self._most * MOST_CHUNKS))

    @property
    def least(self) -> int:
        """The rows that stay together although other processes may be idle."""
        return max(self._wanted, 1)

    @property
    def is_limited_by_time(self) -> bool:
        """Whether rows take so long that the time budget limits a chunk, not its largest size."""
        return self._row_s is not None and self.in_time < self._most

    @property
    def fits(self) -> bool:
        """Whether one row fits the time budget; assumed until the first row has run."""
        return self._row_s is None or self._row_s < self._time_budget_s


# -- The last renewal of a worker's leases, which the processes of its pool read ------------------


class LastRenewal(NamedTuple):
    """The last renewal of leases that succeeded. Both times are those of the monotonic clock.

    The docstring of `delaytasks.worker.shared_memory.Renewals` has a drawing of them.
    """

    #: When the renewal was requested. The renewed leases last from this time on.
    asked_at: float
    #: The lease of a row that was claimed before this time had ended before the renewal was
    #: answered.
    lost_if_claimed_before: float


#: No lease has been renewed yet.
NO_RENEWAL = LastRenewal(-inf, -inf)
