"""What the pages show of the whole deployment. All viewers share it for some seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from delaytasks.client import DelayTasks
from delaytasks.console.failures import FailedNow, groups_of
from delaytasks.console.queries import MOST_DUE, MOST_FAILED, ConsoleQueries, QueueCounts
from delaytasks.core.errors import StoreError
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.masking import mask_url
from delaytasks.core.policies import Policy
from delaytasks.core.registered_worker import RegisteredWorker
from delaytasks.operations.overdue import ExplainedGroup, explain_overdue
from delaytasks.routing.shard import Shard
from delaytasks.statistics.gauge_queries import GaugeQueries
from delaytasks.statistics.gauges import Gauges
from delaytasks.storage.stats import Stats
from delaytasks.wiring import wiring_of

#: The bars of the histogram of due times, and the time of each.
BARS, BAR = 30, timedelta(minutes=1)
#: Groups of overdue tasks by queue and tag.
MAX_LATE_GROUPS = 10


@dataclass(frozen=True)
class Sweep:
    shard: int
    partition: int
    at: datetime | None
    is_late: bool


@dataclass(frozen=True)
class DatabaseState:
    number: int
    url: str
    server: str | None = None
    error: str | None = None


@dataclass
class Snapshot:
    """The state of all databases that could be read."""

    now: datetime
    #: Numbers of tasks. Those above 20,000 are estimates.
    gauges: Gauges = field(default_factory=Gauges)
    oldest: datetime | None = None
    late: list[ExplainedGroup] = field(default_factory=list)
    expired_leases: int = 0
    workers: list[RegisteredWorker] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    databases: list[DatabaseState] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)
    groups: list[FailedNow] = field(default_factory=list)
    has_all_failures: bool = True
    #: Waiting tasks that are due in each of the next minutes.
    due: list[int] = field(default_factory=lambda: [0] * BARS)
    #: Whether more tasks are due than were counted.
    is_due_cut: bool = False
    broker_error: str | None = None
    uses_broker: bool = True
    timer: str = ""

    @property
    def overdue(self) -> int:
        return int(self.gauges.overdue)

    @property
    def alive(self) -> list[RegisteredWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    def serving(self, queue: str) -> list[RegisteredWorker]:
        """Return the live workers that serve a queue."""
        return [each for each in self.alive if each.serves(queue)]

    @property
    def paused(self) -> list[Policy]:
        return [policy for policy in self.policies if policy.is_paused]

    @property
    def is_down(self) -> bool:
        return bool(self.databases) and all(each.error for each in self.databases)


def take_snapshot(delays: DelayTasks) -> Snapshot:
    """Read the state of every database. An error of one is part of the result."""
    found = Snapshot(wiring_of(delays).clock.now())
    for shard in delays.shards:
        url = mask_url(shard.store.database.url.render_as_string(hide_password=True))
        try:
            _read(found, delays, shard)
            server = Stats(shard.store.database, shard.store.schema).server()
            found.databases.append(DatabaseState(shard.number, url, server))
        except StoreError as error:
            found.databases.append(DatabaseState(shard.number, url, error=str(error)))
    try:
        found.policies = delays.policies()
    except StoreError:
        pass  # the databases have errors, which the page shows
    # Each worker reports to each database.
    found.workers = list({worker.name: worker for worker in found.workers}.values())
    wiring = wiring_of(delays)
    found.uses_broker = wiring.direct_timer is None
    found.timer = delays.settings.timer
    return found


def _read(found: Snapshot, delays: DelayTasks, shard: Shard) -> None:
    settings, store = delays.settings, shard.store
    numbers, queries, now = Stats(store.database, store.schema), ConsoleQueries(store), found.now
    gauges = GaugeQueries(store.database, store.schema).count(settings.grace_s, settings.silent_s)
    found.gauges = Gauges.total([found.gauges, gauges])
    if gauges.overdue:
        oldest = now - timedelta(seconds=gauges.oldest_overdue_s)
        found.oldest = min(found.oldest or oldest, oldest)
    found.expired_leases += numbers.expired_leases(settings.lease_s)
    found.workers += store.workers.registered(now, settings.silent_s)
    for swept in numbers.sweeps(settings.sweep_partitions):
        is_late = swept.is_late(now, settings.self_sweep_s)
        found.sweeps.append(Sweep(shard.number, swept.sweep_partition, swept.at, is_late))
    if gauges.overdue:
        found.late += explain_overdue(shard, settings, MAX_LATE_GROUPS)
    due = queries.due_between(now, now + BARS * BAR)
    found.is_due_cut |= len(due) >= MOST_DUE
    for at in due:
        found.due[min((at - now) // BAR, BARS - 1)] += 1
    if gauges.failed:
        failed = queries.failed()
        found.has_all_failures &= len(failed) < MOST_FAILED
        found.groups += groups_of(failed, now)


def count_queues(
    delays: DelayTasks, now: datetime, workers: Sequence[RegisteredWorker]
) -> list[QueueCounts]:
    """Return the queues that have live tasks, workers or a pause."""
    served = {queue for worker in workers for queue in worker.queues if queue != ALL_QUEUES}
    found: dict[str, QueueCounts] = {}
    for shard in delays.shards:
        for each in ConsoleQueries(shard.store).queues(
            now, sorted({delays.settings.default_queue, *served})
        ):
            seen = found.get(each.name, QueueCounts(each.name, 0, 0, 0, 0))
            found[each.name] = QueueCounts(
                each.name, *(a + b for a, b in zip(seen[1:], each[1:], strict=True))
            )
    return [found[name] for name in sorted(found)]
