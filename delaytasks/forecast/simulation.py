"""Computes when tasks start that become due in a group of workers. Nothing is read or written here.

Work is measured in process-seconds: a task that occupies a process for 50 ms is 0.05. Between two
events the processes work at constant rates, so all times are computed exactly, without time steps.
The rules are those of the workers, simplified:

- Tasks without limits start in the order of their due times.
- Tasks of a tag with a limit have a service queue of their own, and use at most the processes that
  the limit allows. They do not delay other tags more than their share.
- If several service queues have a backlog, the processes are divided evenly among them, and what
  one cannot use is divided among the others.

With more processes, no task therefore starts later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: Work that is smaller counts as done: it is a rounding error.
TINY = 1e-7


class Arrival(NamedTuple):
    """Tasks of one tag that become due together, or evenly in a short time."""

    #: Seconds since the start of the simulation.
    at_s: float
    tag: str
    #: The number of tasks, which may be a fraction if it was estimated.
    tasks: float
    #: The time in which they become due. The processes may start them at its begin.
    length_s: float = 0.0


class Service(NamedTuple):
    """What the tasks of a tag need."""

    #: The time for which one task occupies a process.
    seconds: float
    #: The most tasks that start in a second, by the limits of the tag; None without limits.
    most_per_s: float | None = None


class Batch(NamedTuple):
    """Tasks that become due at the same time and wait in the same service queue."""

    at_s: float
    #: The tag of a service queue with a limit; None for that of all tags without limits.
    queue: str | None
    #: The process-seconds of all its tasks, and of the last one.
    work: float
    last_work: float
    #: The shortest length of its arrivals.
    length_s: float


class Load(NamedTuple):
    """The arrivals of a simulation, prepared for any number of processes."""

    batches: Sequence[Batch]
    #: The batch of each arrival, by its index.
    batch_of: Sequence[int]
    #: The most processes that each service queue can use.
    most: Mapping[str | None, float]


class Served(NamedTuple):
    """When the tasks of an arrival or a batch start.

    Both times are infinite if there are no processes.
    """

    #: When the processes reach the first task, and when they reach the last one.
    first_s: float
    last_s: float


def load_of(arrivals: Sequence[Arrival], services: Mapping[str, Service]) -> Load:
    """Prepare a simulation.

    Parameters
    ----------
    arrivals
        What becomes due, in the order of time.
    services
        The needs of each tag.
    """
    batches: list[Batch] = []
    batch_of: list[int] = []
    most: dict[str | None, float] = {}
    here: dict[str | None, tuple[int, float]] = {}
    at: float | None = None
    for at_s, tag, tasks, length_s in arrivals:
        if at_s != at:
            here.clear()
            at = at_s
        seconds, most_per_s = services[tag]
        queue = None if most_per_s is None else tag
        most[queue] = math.inf if most_per_s is None else max(most_per_s * seconds, TINY)
        work = tasks * seconds
        if queue in here:
            index, number = here[queue]
            work, number = work + batches[index].work, number + tasks
            length_s = min(length_s, batches[index].length_s)
        else:
            index, number = len(batches), tasks
            batches.append(Batch(at_s, queue, 0.0, 0.0, 0.0))
        here[queue] = (index, number)
        batches[index] = Batch(at_s, queue, work, work / max(number, 1.0), length_s)
        batch_of.append(index)
    return Load(batches, batch_of, most)


def simulate(load: Load, processes: float) -> list[Served]:
    """Return when the tasks of each batch start, if this number of processes serves them all."""
    if processes <= 0:
        return [Served(math.inf, math.inf)] * len(load.batches)
    if len(load.most) <= 1:
        return _simulate_single_queue(load.batches, min([*load.most.values(), processes]))
    served = [Served(each.at_s, each.at_s) for each in load.batches]
    queues = {name: _ServiceQueue(min(most, processes)) for name, most in load.most.items()}
    now = 0.0
    for index, batch in enumerate(load.batches):
        _advance([*queues.values()], now, batch.at_s, processes, served)
        now = max(now, batch.at_s)
        queues[batch.queue].add(index, batch)
    _advance([*queues.values()], now, math.inf, processes, served)
    return served


def lateness_s(batch: Batch, served: Served) -> float:
    """Return the longest time between the due time of a task of a batch and its start."""
    return max(served.first_s - batch.at_s, served.last_s - batch.at_s - batch.length_s, 0.0)


def _simulate_single_queue(batches: Sequence[Batch], rate: float) -> list[Served]:
    """Return when the batches start if all are in one service queue, which is a simple sum."""
    served: list[Served] = []
    free_s = 0.0
    for at_s, _, work, last_work, _ in batches:
        first_s = max(free_s, at_s)
        free_s = first_s + work / rate
        served.append(Served(first_s, first_s + (work - last_work) / rate))
    return served


class _Waiting(NamedTuple):
    """A batch in a service queue."""

    #: Its index among all batches.
    number: int
    #: The work of the service queue before this batch, and before its last task.
    begins: float
    last: float


@dataclass
class _ServiceQueue:
    """Tasks that start one after the other."""

    #: The most processes that the service queue can use.
    most: float
    arrived: float = 0.0
    done: float = 0.0
    #: When the first batch in `batches` began, if it has begun.
    first_s: float | None = None
    batches: deque[_Waiting] = field(default_factory=deque)

    @property
    def waiting(self) -> float:
        return self.arrived - self.done

    @property
    def is_busy(self) -> bool:
        return self.waiting > TINY

    def add(self, number: int, batch: Batch) -> None:
        last = self.arrived + batch.work - batch.last_work
        self.batches.append(_Waiting(number, self.arrived, last))
        self.arrived += batch.work

    def advance(self, now: float, elapsed: float, rate: float, served: list[Served]) -> None:
        """Do `rate * elapsed` of the work, and write down when tasks start."""
        before, self.done = self.done, min(self.done + rate * elapsed, self.arrived)
        if self.waiting <= TINY:
            self.done = self.arrived
        while self.batches and self.batches[0].begins <= self.done:
            number, begins, last = self.batches[0]
            if self.first_s is None:
                self.first_s = now + max(begins - before, 0.0) / rate
            if last > self.done:
                return
            last_s = max(now + max(last - before, 0.0) / rate, self.first_s)
            served[number] = Served(self.first_s, last_s)
            self.batches.popleft()
            self.first_s = None


def _advance(
    queues: Sequence[_ServiceQueue],
    now: float,
    until: float,
    processes: float,
    served: list[Served],
) -> None:
    """Let the processes work from `now` to `until`."""
    while now < until:
        busy = [queue for queue in queues if queue.is_busy]
        if not busy:
            return
        rates = _shares([queue.most for queue in busy], processes)
        first = min(queue.waiting / rate for queue, rate in zip(busy, rates, strict=True))
        elapsed = min(first, until - now)
        for queue, rate in zip(busy, rates, strict=True):
            queue.advance(now, elapsed, rate, served)
        now += elapsed


def _shares(most: Sequence[float], processes: float) -> list[float]:
    """Divide the processes evenly; what one queue cannot use is divided among the others."""
    shares, left = [0.0] * len(most), processes
    for position, index in enumerate(sorted(range(len(most)), key=lambda index: most[index])):
        shares[index] = min(most[index], left / (len(most) - position))
        left -= shares[index]
    return shares
