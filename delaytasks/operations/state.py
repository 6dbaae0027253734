"""Reads the state of a deployment: the contents of its database, and which services answer.

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
from delaytasks.core.policies import Policy
from delaytasks.core.run_counts import CountedFailures
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.core.workers import (
    LostWorker,
    RegisteredWorker,
    beat_age_s,
    broker_down_s,
    lost_everywhere,
)
from delaytasks.operations.failed_now import FailedNow, groups_of
from delaytasks.operations.overdue import MAX_EXPLAINED_GROUPS, ExplainedGroup, explain_overdue
from delaytasks.operations.policies import read_policies
from delaytasks.storage.failed_rows import MOST_FAILED, FailedRow, failed_rows, rows_of
from delaytasks.storage.overdue_rows import OverdueCount, OverdueRows
from delaytasks.storage.stats import MAX_COUNTED, Count, Stats
from delaytasks.storage.store import Store

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


class SweepState(NamedTuple):
    """The last sweep of a sweep partition; without times if there was none."""

    partition: int
    at: datetime | None
    age_s: float | None
    armed_until: datetime | None
    is_late: bool


class TableState(NamedTuple):
    """The contents of the tables at one time, in numbers."""

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
    """Whether the database answers."""

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
    """The state of the tables, and of the services."""

    now: datetime
    #: None if the database does not answer.
    tables: TableState | None
    database: DatabaseState
    policies: Sequence[Policy]
    services: ServicesState
    #: The workers by name.
    workers: Sequence[RegisteredWorker]
    #: The workers that were lost within the last hour, the latest loss first.
    lost: Sequence[LostWorker]
    #: Failures with the same tag and kind of error.
    groups: Sequence[FailedNow]

    def count(self, status: Status) -> int:
        return 0 if self.tables is None else self.tables.counts[status].rows

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
        return 0 if self.tables is None else self.tables.overdue.tasks

    @property
    def oldest(self) -> datetime | None:
        """When the oldest overdue task was due."""
        return None if self.tables is None else self.tables.overdue.oldest

    @property
    def late(self) -> list[ExplainedGroup]:
        """The largest groups of overdue tasks, with the reasons why they have not begun."""
        return [] if self.tables is None else self.tables.late

    @property
    def expired_leases(self) -> int:
        return 0 if self.tables is None else self.tables.expired_leases

    @property
    def sweeps(self) -> list[SweepState]:
        return [] if self.tables is None else self.tables.sweeps

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
        return self.tables is None or _has_all_failures(self.tables)

    @property
    def beat_age_s(self) -> float | None:
        return beat_age_s(self.workers)

    @property
    def broker_down_s(self) -> float | None:
        return broker_down_s(self.workers)

    @property
    def is_down(self) -> bool:
        """Whether the database does not answer."""
        return self.database.error is not None


def read_state(
    runtime: Runtime,
    read_failures: Callable[[Runtime, datetime], Sequence[CountedFailures]],
    services: ServicesState,
    now: datetime,
    most_counted: int = MAX_COUNTED,
) -> DeploymentState:
    """Read the state. The error of the database is part of the result.

    `read_failures` returns the failures that workers have counted.
    """
    store = runtime.store
    database, tables = DatabaseState(store.database.shown_url), None
    policies, lost = list[Policy](), list[LostWorker]()
    try:
        tables = read_tables(store, runtime.settings, most_counted, with_failed=True)
        lost = store.workers.lost()
        database = database._replace(server=Stats(store.database, store.schema).server())
        policies, held = read_policies(store.policies)
        tables = _with_count(tables, Status.HELD, held)
    except StoreError as error:
        database = database._replace(error=error)
    workers = [] if tables is None else tables.workers
    return DeploymentState(
        now,
        tables,
        database,
        policies,
        services,
        workers,
        lost_everywhere(lost, {worker.name for worker in workers}),
        [] if tables is None else _groups(runtime, tables, read_failures, now),
    )


def _groups(
    runtime: Runtime,
    tables: TableState,
    read_failures: Callable[[Runtime, datetime], Sequence[CountedFailures]],
    now: datetime,
) -> list[FailedNow]:
    counted: Sequence[CountedFailures] = ()
    last: list[FailedRow] = []
    try:
        counted = read_failures(runtime, now)
        ids = [each.group.task_id for each in counted]
        last = list(rows_of(runtime.store.database, runtime.store.schema, ids))
    except StoreError:
        pass  # the tables of statistics may be missing; FAILED tasks are known without them
    return groups_of(tables.failed, now, counted, last, has_more=not _has_all_failures(tables))


def _has_all_failures(tables: TableState) -> bool:
    return len(tables.failed) < MOST_FAILED


def read_tables(
    store: Store, settings: Settings, most_counted: int = MAX_COUNTED, *, with_failed: bool = False
) -> TableState:
    """Read the state of the tables.

    Parameters
    ----------
    most_counted
        A larger number of tasks of a status is the planner's estimate.
    with_failed
        Read the failed tasks that were due last, with their errors.
    """
    began = monotonic()
    stats, now = Stats(store.database, store.schema), store.tasks.now()
    counts = stats.counts(most_counted)
    overdue = OverdueRows(store.database, store.schema).count(settings.grace_s, most_counted)
    late = explain_overdue(store, settings) if overdue.tasks else []
    if overdue.tasks and len(late) < MAX_EXPLAINED_GROUPS:  # these are all overdue tasks
        oldest = min((group.oldest for group in late), default=None)
        overdue = OverdueCount(sum(group.tasks for group in late), oldest)
    has_failed = with_failed and counts[Status.FAILED].rows
    failed = failed_rows(store.database, store.schema) if has_failed else []
    state = TableState(
        now=now,
        counts=counts,
        overdue=overdue,
        late=late,
        expired_leases=stats.expired_leases(),
        sweeps=list(_sweeps(stats, settings, now)),
        workers=store.workers.registered(now, settings.silent_s),
        paused=sum(policy.is_paused for policy in store.policies.read()),
        failed=failed,
        read_s=monotonic() - began,
    )
    has_all = has_failed and len(failed) < MOST_FAILED
    return _with_count(state, Status.FAILED, len(failed) if has_all else None)


def _with_count(state: TableState, status: Status, rows: int | None) -> TableState:
    """Replace the number of a status by that of a later query, unless it is None.

    Tasks may have moved between two queries. The sentences of the verdict contain the numbers of
    the later one.
    """
    if rows is None:
        return state
    return state._replace(counts={**state.counts, status: Count(rows)})


def _sweeps(stats: Stats, settings: Settings, now: datetime) -> Iterator[SweepState]:
    for swept in stats.sweeps(settings.sweep_partitions):
        is_late = swept.is_late(now, settings.self_sweep_s)
        yield SweepState(
            swept.sweep_partition,
            swept.at,
            swept.age_s(now),
            swept.armed_until,
            is_late,
        )
