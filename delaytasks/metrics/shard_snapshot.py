"""The metrics of one database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from math import inf
from typing import NamedTuple

from delaytasks.core.clock import monotonic
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.interfaces import OverdueGroup
from delaytasks.core.registered_worker import RegisteredWorker
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.routing.shard import Shard
from delaytasks.storage.stats import Count, OverdueCount, Stats, Swept

#: The most groups of overdue tasks, the most queues, and the most workers that get labels.
MAX_GROUPS, MAX_QUEUES, MAX_WORKERS = 20, 100, 100


class ShardSnapshot(NamedTuple):
    """What one database contained at one time."""

    shard: int
    now: datetime
    #: How long the queries took.
    seconds: float
    counts: dict[Status, Count]
    overdue: OverdueCount
    groups: list[OverdueGroup]
    expired_leases: int
    sweeps: list[Swept]
    workers: list[RegisteredWorker]
    paused: int
    partitions_end: datetime | None

    @property
    def oldest_overdue_s(self) -> float:
        """How late the oldest overdue task is, or 0."""
        oldest = self.overdue.oldest
        return 0.0 if oldest is None else max((self.now - oldest).total_seconds(), 0.0)

    @property
    def partitions_end_s(self) -> float | None:
        end = self.partitions_end
        return None if end is None else (end - self.now).total_seconds()

    def sweep_ages(self) -> Iterator[tuple[int, float]]:
        """Yield the seconds since the last sweep of each sweep partition; inf without any."""
        for swept in self.sweeps:
            age_s = swept.age_s(self.now)
            yield swept.sweep_partition, inf if age_s is None else age_s

    def alive_workers(self) -> list[RegisteredWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    def queue_workers(self) -> dict[str, int]:
        """Return how many live workers serve each queue that is served or has overdue tasks."""
        alive = self.alive_workers()
        served = Counter(queue for worker in alive for queue in worker.queues)
        of_all = served.pop(ALL_QUEUES, 0)
        names = [group.queue for group in self.groups] + sorted(served)
        return {name: served[name] + of_all for name in list(dict.fromkeys(names))[:MAX_QUEUES]}

    def overdue_by_tag(self) -> dict[tuple[str, str], int]:
        """Return the overdue tasks of the largest groups, by queue and tag."""
        found: Counter[tuple[str, str]] = Counter()
        for group in self.groups:
            found[group.queue, group.tag] += group.tasks
        return dict(found)


def read_shard(shard: Shard, settings: Settings) -> ShardSnapshot:
    """Read what the metrics of a database need.

    The statements are those of `delaytasks stats`. The number of rows that they read is bounded,
    except that of overdue rows.
    """
    began, store = monotonic(), shard.store
    stats, now = Stats(store.database, store.schema), store.tasks.now()
    overdue = stats.overdue(settings.grace_s)
    workers = store.workers.registered(now, settings.silent_s)[:MAX_WORKERS]
    return ShardSnapshot(
        shard=shard.number,
        now=now,
        counts=stats.counts(),
        overdue=overdue,
        groups=stats.late(settings.grace_s, MAX_GROUPS) if overdue.tasks else [],
        expired_leases=stats.expired_leases(settings.lease_s),
        sweeps=stats.sweeps(settings.sweep_partitions),
        workers=workers,
        paused=sum(policy.is_paused for policy in store.policies.read()),
        partitions_end=store.sweeps.partitions_end(),
        seconds=monotonic() - began,
    )
