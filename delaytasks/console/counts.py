"""Numbers of tasks that single pages show beyond the state of the deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from delaytasks.client import DelayTasks
from delaytasks.console.queries import MOST_DUE, ConsoleQueries, QueueCounts
from delaytasks.core.errors import StoreError
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.registered_worker import RegisteredWorker
from delaytasks.runtime import runtime_of

#: The bars of the histogram of due times, and the time of each.
BARS, BAR = 30, timedelta(minutes=1)


@dataclass(frozen=True)
class DueSoon:
    """Waiting tasks that are due in each of the next minutes."""

    counts: Sequence[int]
    #: Whether more tasks are due than were counted.
    is_cut: bool


def count_due(delays: DelayTasks, now: datetime) -> DueSoon:
    """Count what is due soon in the databases that answer."""
    counts, is_cut = [0] * BARS, False
    for shard in runtime_of(delays).shards:
        try:
            due = ConsoleQueries(shard.store).due_between(now, now + BARS * BAR)
        except StoreError:
            continue  # the state of the deployment has the error
        is_cut |= len(due) >= MOST_DUE
        for at in due:
            counts[min((at - now) // BAR, BARS - 1)] += 1
    return DueSoon(counts, is_cut)


def count_queues(delays: DelayTasks, workers: Sequence[RegisteredWorker]) -> list[QueueCounts]:
    """Return the queues that have live tasks, workers or a pause."""
    served = {queue for worker in workers for queue in worker.queues if queue != ALL_QUEUES}
    found: dict[str, QueueCounts] = {}
    for shard in runtime_of(delays).shards:
        for each in ConsoleQueries(shard.store).queues(
            sorted({delays.settings.default_queue, *served}), delays.settings.grace_s
        ):
            seen = found.get(each.name)
            found[each.name] = each if seen is None else _together(seen, each)
    return [found[name] for name in sorted(found)]


def _together(a: QueueCounts, b: QueueCounts) -> QueueCounts:
    return QueueCounts(
        a.name,
        a.waiting + b.waiting,
        a.overdue + b.overdue,
        a.running + b.running,
        a.held + b.held,
        min((each.oldest for each in (a, b) if each.oldest is not None), default=None),
    )
