"""Which queues are served by the same workers."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from delaytasks.core.registered_worker import RegisteredWorker


class WorkerPool(NamedTuple):
    """Queues that share workers."""

    queues: frozenset[str]
    workers: int
    #: The processes of one worker. It is a fraction if the workers differ.
    processes_each: float

    @property
    def processes(self) -> float:
        return self.workers * self.processes_each


def pools_of(
    queues: Collection[str],
    live: Collection[RegisteredWorker],
    workers: int | None,
    processes: int | None,
    default_processes: int,
) -> list[WorkerPool]:
    """Divide the queues among the workers that serve them.

    Parameters
    ----------
    queues
        The queues that have tasks.
    live
        The workers that are alive.
    workers
        The number of workers of each pool, if the caller asks for a number. If no worker is alive,
        it is 1.
    processes
        The number of processes of each worker, if the caller asks for a number.
    default_processes
        The number of processes of a worker if none is alive.
    """
    pools: list[WorkerPool] = []
    for group in _groups(queues, live):
        mine = [worker for worker in live if any(map(worker.serves, group))]
        each: float = default_processes
        if mine:
            each = sum(max(worker.concurrency, 1) for worker in mine) / len(mine)
        # Without any worker, the forecast is for one.
        number = (len(mine) if live else 1) if workers is None else workers
        pools.append(WorkerPool(group, number, processes or each))
    return sorted(pools, key=lambda pool: min(pool.queues))


def _groups(queues: Collection[str], live: Collection[RegisteredWorker]) -> list[frozenset[str]]:
    """Return sets of queues such that no worker serves queues of two sets.

    Queues that no worker serves are one set.
    """
    groups: list[set[str]] = []
    for worker in live:
        served = {queue for queue in queues if worker.serves(queue)}
        if not served:
            continue
        groups, others = [group for group in groups if not group & served], groups
        groups.append(served.union(*(group for group in others if group & served)))
    alone = set(queues).difference(*groups)
    return [frozenset(group) for group in [*groups, alone] if group]
