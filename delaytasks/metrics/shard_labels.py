"""The values of a database's metrics that have labels. The number of labels is bounded."""

from __future__ import annotations

from collections import Counter

from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.registered_worker import RegisteredWorker
from delaytasks.operations.state import ShardState

#: The most queues and the most workers that get labels.
MAX_QUEUES, MAX_WORKERS = 100, 100


def labelled_workers(state: ShardState) -> list[RegisteredWorker]:
    """Return the first workers by name."""
    return state.workers[:MAX_WORKERS]


def live_workers(state: ShardState) -> list[RegisteredWorker]:
    """Return the live ones of the first workers by name."""
    return [worker for worker in labelled_workers(state) if worker.is_alive]


def queue_workers(state: ShardState) -> dict[str, int]:
    """Return how many live workers serve each queue that is served or has overdue tasks."""
    alive = [worker for worker in state.workers if worker.is_alive]
    served = Counter(queue for worker in alive for queue in worker.queues)
    of_all = served.pop(ALL_QUEUES, 0)
    names = [group.queue for group in state.late] + sorted(served)
    return {name: served[name] + of_all for name in list(dict.fromkeys(names))[:MAX_QUEUES]}


def overdue_by_tag(state: ShardState) -> dict[tuple[str, str], int]:
    """Return the overdue tasks of the largest groups, by queue and tag."""
    found: Counter[tuple[str, str]] = Counter()
    for group in state.late:
        found[group.queue, group.tag] += group.tasks
    return dict(found)
