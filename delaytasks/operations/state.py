"""Reads the state of a deployment: the contents of its databases, and which services answer.

The console, `delaytasks stats`, `top` and the exporter read it here, so that they
show the same numbers. `verdict.py` judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import StoreError
from delaytasks.core.failure_group import CountedFailures
from delaytasks.core.policies import Policy
from delaytasks.core.registered_worker import (
    LostWorker,
    RegisteredWorker,
    beat_age_s,
    broker_down_s,
    lost_everywhere,
)
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.operations.failed_now import FailedNow, groups_of
from delaytasks.operations.overdue import MAX_EXPLAINED_GROUPS, ExplainedGroup, explain_overdue
from delaytasks.operations.policies import CountedPolicies
from delaytasks.storage.failed_rows import MOST_FAILED, FailedRow, failed_rows, rows_of
from delaytasks.storage.overdue_rows import OverdueCount, OverdueRows
from delaytasks.storage.stats import MAX_COUNTED, Count, Stats

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime as Shard


class SweepState(NamedTuple):
    """The last sweep of a sweep partition; without times if there was none."""

    shard: int
    partition: int
    at: datetime | None
    age_s: float | None
    armed_until: datetime | None
    is_late: bool


class ShardState(NamedTuple):
    """The contents of one database at one time, in numbers."""

    shard: int
    now: datetime
    counts: dict[Status, Count]
    overdue: OverdueCount
    #: The largest groups of overdue tasks.
    late: list[ExplainedGroup]
    expired_leases: int
    sweeps: list[SweepState]
    workers: list[RegisteredWorker]
    #: The number of paused tags and queues.
    paused: int
    #: The failed tasks that were due last; empty if they were not asked for.
    failed: list[FailedRow]
    #: How long the queries took.
    read_s: float

    @property
    def oldest_overdue_s(self) -> float:
        """How late the oldest overdue task is, or 0."""
        oldest = self.overdue.oldest
        return 0.0 if oldest is None else max((self.now - oldest).total_seconds(), 0.0)


class DatabaseState(NamedTuple):
    """Whether a database answers."""

    number: int
    #: Without the password.
    url: str
    server: str | None = None
    error: StoreError | None = None


class ServicesState(NamedTuple):
    """The broker and the timer, as the process sees them that asks."""

    timer: str
    uses_broker: bool
    broker_error: str | None = None


@dataclass(frozen=True)
class DeploymentState:
    """The state of all databases that could be read, and of the services."""

    now: datetime
    shards: Sequence[ShardState]
    databases: Sequence[DatabaseState]
    policies: Sequence[Policy]
    services: ServicesState
    #: The workers by name. Each of them reports to each database.
    workers: Sequence[RegisteredWorker]
    #: The workers that were lost within the last hour, the latest loss first.
    lost: Sequence[LostWorker]
    #: Failures with the same tag and kind of error, of all databases together.
    groups: Sequence[FailedNow]

    def count(self, status: Status) -> int:
        return sum(one.counts[status].rows for one in self.shards)

    @property
    def waiting(self) -> int:
        return self.count(Status.NOT_COMPLETE)

    @property
    def running(self) -> int:
        return self.count(Status.RUNNING)

    @property
    def failed(self) -> int:
        return self.count(Status.FAILED)

    @property
    def held(self) -> int:
        return self.count(Status.HELD)

    @property
    def overdue(self) -> int:
        return sum(one.overdue.tasks for one in self.shards)

    @property
    def oldest(self) -> datetime | None:
        """When the oldest overdue task was due."""
        found = (one.overdue.oldest for one in self.shards)
        return min((at for at in found if at is not None), default=None)

    @property
    def late(self) -> list[ExplainedGroup]:
        """The largest groups of overdue tasks, with the reasons why they have not begun."""
        found = (group for one in self.shards for group in one.late)
        return sorted(found, key=lambda group: -group.tasks)

    @property
    def expired_leases(self) -> int:
        return sum(one.expired_leases for one in self.shards)

    @property
    def sweeps(self) -> list[SweepState]:
        return [sweep for one in self.shards for sweep in one.sweeps]

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
    def has_all_failures(self) -> bool:
        """Whether all FAILED tasks are in `groups`."""
        return _has_all_failures(self.shards)

    @property
    def beat_age_s(self) -> float | None:
        return beat_age_s(self.workers)

    @property
    def broker_down_s(self) -> float | None:
        return broker_down_s(self.workers)

    @property
    def is_down(self) -> bool:
        """Whether no database answers."""
        return bool(self.databases) and all(each.error for each in self.databases)


def read_state(
    shards: Sequence[Shard],
    settings: Settings,
    read_policies: Callable[[], CountedPolicies],
    read_failures: Callable[[Sequence[Shard], datetime], Sequence[CountedFailures]],
    services: ServicesState,
    now: datetime,
    most_counted: int = MAX_COUNTED,
) -> DeploymentState:
    """Read the state of every database. The error of a database is part of the result.

    `read_failures` returns the failures that workers have counted in the databases that answer.
    """
    found, databases = list[ShardState](), list[DatabaseState]()
    lost: list[LostWorker] = []
    for shard in shards:
        store = shard.store
        url = store.database.shown_url
        try:
            found.append(read_shard(shard, settings, most_counted, with_failed=True))
            lost += store.workers.lost()
            server = Stats(store.database, store.schema).server()
            databases.append(DatabaseState(shard.number, url, server))
        except StoreError as error:
            databases.append(DatabaseState(shard.number, url, error=error))
    try:
        policies, held = read_policies()
    except StoreError:
        policies, held = [], None  # the database does not answer, and its error is known
    found = [_with_count(one, Status.HELD, held) for one in found]
    workers = {worker.name: worker for one in found for worker in one.workers}
    answering = [shard for shard, each in zip(shards, databases, strict=True) if each.error is None]
    return DeploymentState(
        now,
        found,
        databases,
        policies,
        services,
        list(workers.values()),
        lost_everywhere(lost, workers),
        _groups(answering, found, read_failures, now),
    )


def _groups(
    shards: Sequence[Shard],
    found: Sequence[ShardState],
    read_failures: Callable[[Sequence[Shard], datetime], Sequence[CountedFailures]],
    now: datetime,
) -> list[FailedNow]:
    failed = [row for one in found for row in one.failed]
    counted: Sequence[CountedFailures] = ()
    last: list[FailedRow] = []
    try:
        counted = read_failures(shards, now)
        ids = [each.group.task_id for each in counted]
        last = [row for s in shards for row in rows_of(s.store.database, s.store.schema, ids)]
    except StoreError:
        pass  # the tables of statistics may be missing; FAILED tasks are known without them
    return groups_of(failed, now, counted, last, has_more=not _has_all_failures(found))


def _has_all_failures(shards: Sequence[ShardState]) -> bool:
    return all(len(one.failed) < MOST_FAILED for one in shards)


def read_shard(
    shard: Shard, settings: Settings, most_counted: int = MAX_COUNTED, *, with_failed: bool = False
) -> ShardState:
    """Read the state of one database.

    Parameters
    ----------
    most_counted
        A larger number of tasks of a status is the planner's estimate.
    with_failed
        Read the failed tasks that were due last, with their errors.
    """
    began, store = monotonic(), shard.store
    stats, now = Stats(store.database, store.schema), store.tasks.now()
    counts = stats.counts(most_counted)
    overdue = OverdueRows(store.database, store.schema).count(settings.grace_s, most_counted)
    late = explain_overdue(store, settings) if overdue.tasks else []
    if overdue.tasks and len(late) < MAX_EXPLAINED_GROUPS:  # these are all overdue tasks
        oldest = min((group.oldest for group in late), default=None)
        overdue = OverdueCount(sum(group.tasks for group in late), oldest)
    has_failed = with_failed and counts[Status.FAILED].rows
    failed = failed_rows(store.database, store.schema) if has_failed else []
    state = ShardState(
        shard=shard.number,
        now=now,
        counts=counts,
        overdue=overdue,
        late=late,
        expired_leases=stats.expired_leases(settings.lease_s),
        sweeps=list(_sweeps(shard, stats, settings, now)),
        workers=store.workers.registered(now, settings.silent_s),
        paused=sum(policy.is_paused for policy in store.policies.read()),
        failed=failed,
        read_s=monotonic() - began,
    )
    has_all = has_failed and len(failed) < MOST_FAILED
    return _with_count(state, Status.FAILED, len(failed) if has_all else None)


def _with_count(state: ShardState, status: Status, rows: int | None) -> ShardState:
    """Replace the number of a status by that of a later query, unless it is None.

    Tasks may have moved between two queries. The sentences of the verdict contain the numbers of
    the later one.
    """
    if rows is None:
        return state
    return state._replace(counts={**state.counts, status: Count(rows)})


def _sweeps(shard: Shard, stats: Stats, settings: Settings, now: datetime) -> Iterator[SweepState]:
    for swept in stats.sweeps(settings.sweep_partitions):
        is_late = swept.is_late(now, settings.self_sweep_s)
        yield SweepState(
            shard.number,
            swept.sweep_partition,
            swept.at,
            swept.age_s(now),
            swept.armed_until,
            is_late,
        )
