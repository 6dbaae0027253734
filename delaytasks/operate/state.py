"""One bounded snapshot of a deployment: workers, queues, overdue and failed tasks.

The console, `delaytasks status`, `status --watch` and the exporter read it here, so that they
show the same numbers. `verdict.py` judges it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.broker.link import broker_error
from delaytasks.db.store import Store
from delaytasks.db.sweep_queries import LostWorker, RegisteredWorker
from delaytasks.model.clock import AN_HOUR, hour_of
from delaytasks.model.errors import StoreError
from delaytasks.model.moves import Status
from delaytasks.model.policies import Policy
from delaytasks.operate.policy_calls import with_counts
from delaytasks.operate.state_queries import (
    MAX_COUNTED,
    Count,
    FailedRow,
    OverdueCount,
    OverdueRows,
    Stats,
    SweepState,
    failed_rows,
    has_all_failed,
    rows_of,
    running_by_tag,
    server_problem,
)
from delaytasks.operate.statistics import (
    CountedFailures,
    recent_failures,
    recent_hours,
    recent_late_starts,
)
from delaytasks.operate.why import Reason, why_late
from delaytasks.run.observers import error_pattern
from delaytasks.settings import Settings

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


# -- Groups of failures that have the same tag and the same kind of error -------------------------

# A group has the FAILED tasks that were read, and the failed runs that workers have counted, which
# include those of tasks that wait for a retry. Workers write their counts once a minute.


#: Bars of a sparkline, one for each hour.
SPARK_HOURS = 24
#: The statuses of a task that has failed and is repeated.
RETRIED = (Status.NOT_COMPLETE, Status.HELD, Status.RUNNING)


class RecentRuns(NamedTuple):
    """The failed runs of a group in the present hour and the hour before."""

    runs: int
    since: datetime
    #: Their share in the runs of the tag.
    share: float


@dataclass(frozen=True)
class FailedNow:
    """Failures of one tag whose errors differ in numbers and quoted texts only."""

    name: str
    tag: str
    pattern: str
    #: The FAILED task that failed last, or without one, the last task of the counted runs.
    sample: FailedRow
    #: The FAILED tasks that were read, whether there may be more, and when the first one failed.
    tasks: int
    has_more: bool
    since: datetime | None
    #: All failed runs that are known, those of retried tasks included.
    runs: int
    first_at: datetime | None
    last_at: datetime | None
    #: Failed runs in each of the last hours, the oldest first.
    hours: Sequence[int]
    #: None if no run was counted lately.
    recent: RecentRuns | None
    #: Whether the last task of the counted runs waits for its retry.
    is_retried: bool

    @property
    def summary(self) -> str:
        """The type and the message of the exception, with `…` for what differs."""
        text = self.pattern.rpartition("\n")[2].strip("*").strip()
        # The whole message differs, such as the key of a KeyError.
        text += " *" if text.endswith(":") else ""
        return text.replace("*", "…") or "(no error text)"

    @property
    def filters(self) -> dict[str, Any]:
        """The filters of `find` for the tasks of the group."""
        error = {"error": self.pattern} if self.pattern.strip("*") else {}
        statuses = ["FAILED"] if self.tasks else ["FAILED", "NOT_COMPLETE", "HELD"]
        return {"tag": self.tag, "status": statuses, **error}

    @property
    def where(self) -> str:
        """The function that raised the exception; empty if the error is no traceback."""
        return self.pattern.partition("\n")[0].removeprefix("* in ") if "\n" in self.pattern else ""


def group_name(tag: str, pattern: str) -> str:
    """Return a short name of a group for addresses."""
    return hashlib.sha256(f"{tag}\n{pattern}".encode()).hexdigest()[:12]


def groups_of(
    rows: Iterable[FailedRow],
    now: datetime,
    counted: Iterable[CountedFailures] = (),
    last_rows: Iterable[FailedRow] = (),
    has_more: bool = False,
) -> list[FailedNow]:
    """Return the groups of the rows, those that failed last first.

    Parameters
    ----------
    rows
        FAILED tasks.
    counted, last_rows
        What workers have counted, and the tasks of the last counted runs. Groups without a FAILED
        task are returned too if the last task is FAILED, or waits for its retry.
    has_more
        Whether there are FAILED tasks that were not read.
    """
    members: dict[tuple[str, str], list[FailedRow]] = {}
    for row in rows:
        members.setdefault(_key(row), []).append(row)
    counts = {(each.group.tag, each.group.pattern): each for each in counted}
    lasts = {
        _key(row): row for row in last_rows if row.status == Status.FAILED or row.status in RETRIED
    }
    groups = [
        _group(key, members.get(key, ()), counts.get(key), lasts.get(key), now, has_more)
        for key in {**members, **counts}
        if key in members or key in lasts
    ]
    return sorted(groups, key=lambda group: group.last_at or group.sample.due)[::-1]


def _group(
    key: tuple[str, str],
    members: Sequence[FailedRow],
    counted: CountedFailures | None,
    last: FailedRow | None,
    now: datetime,
    has_more: bool,
) -> FailedNow:
    times = sorted(row.failed_at for row in members if row.failed_at is not None)
    since = times[0] if times else None
    newest = max(members, key=lambda row: (row.failed_at or row.due, row.id), default=last)
    assert newest is not None
    hours, runs = Counter(map(hour_of, times)), len(members)
    if counted is not None:
        # Failures of the last minute, or of a killed worker, may be in the rows only.
        hours |= Counter(counted.group.hours)
        runs = max(runs, counted.group.runs)
        if has_more and members:
            day = hour_of(now) - (SPARK_HOURS - 1) * AN_HOUR
            since = min(filter(None, (since, counted.group.first_since(day))), default=None)
        times = sorted([*times, counted.group.first_at, counted.group.last_at])
    return FailedNow(
        name=group_name(*key),
        tag=key[0],
        pattern=key[1],
        sample=newest,
        tasks=len(members),
        has_more=has_more,
        since=since,
        runs=runs,
        first_at=times[0] if times else None,
        last_at=times[-1] if times else None,
        hours=[hours[hour_of(now) - ago * AN_HOUR] for ago in reversed(range(SPARK_HOURS))],
        recent=None if counted is None else _recent(counted, now),
        is_retried=last is not None and last.status in RETRIED,
    )


def _recent(counted: CountedFailures, now: datetime) -> RecentRuns | None:
    begin = recent_hours(now)
    runs = sum(number for hour, number in counted.group.hours.items() if hour >= begin)
    since = counted.group.first_since(begin)
    return None if since is None else RecentRuns(runs, since, runs / max(runs, counted.runs_of_tag))


def _key(row: FailedRow) -> tuple[str, str]:
    return row.tag, error_pattern(row.error or "")


# -- Groups the overdue tasks of a database, and explains why they have not begun -----------------


#: The groups with the most tasks, which have reasons.
MAX_EXPLAINED_GROUPS = 20
#: Late tasks with these reasons need no operator.
_EXPECTED_CODES = ("due", "limit", "paused")


class ExplainedGroup(NamedTuple):
    """Overdue tasks of one queue and tag, and the reason why they have not begun."""

    queue: str
    tag: str
    tasks: int
    oldest: datetime
    #: The lateness of the oldest task.
    late_s: float
    reason: Reason

    @property
    def is_expected(self) -> bool:
        """Whether the tasks wait for their turn, and not for an operator."""
        return self.reason.code in _EXPECTED_CODES


#: A worker whose outage began within this time after its start has never reached its broker.
CONNECTING_S = 5.0


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


class DatabaseState(NamedTuple):
    """Whether the database answers."""

    #: Without the password.
    url: str
    server: str | None = None
    error: StoreError | None = None
    #: What is wrong with its role in a replication (`server_problem`).
    problem: str | None = None


class ServicesState(NamedTuple):
    """The broker and the timer, as the process sees them that asks."""

    timer: str
    uses_broker: bool
    broker_error: str | None = None


@dataclass(frozen=True)
class DeploymentState:
    """The state of the tables and of the services. Without the database, the tables seem empty."""

    now: datetime
    database: DatabaseState
    services: ServicesState
    counts: Mapping[Status, Count] = field(default_factory=lambda: dict.fromkeys(Status, Count(0)))
    #: The number of overdue tasks, and when the oldest of them was due.
    overdue: int = 0
    oldest: datetime | None = None
    #: The largest groups of overdue tasks, with the reasons why they have not begun.
    late: Sequence[ExplainedGroup] = ()
    expired_leases: int = 0
    sweeps: Sequence[SweepState] = ()
    #: The workers by name.
    workers: Sequence[RegisteredWorker] = ()
    policies: Sequence[Policy] = ()
    #: The workers that were lost within the last hour, the latest loss first.
    lost: Sequence[LostWorker] = ()
    #: Failures with the same tag and kind of error, and whether all FAILED tasks are in them.
    groups: Sequence[FailedNow] = ()
    has_all_failures: bool = True
    #: How many runs began late within `LATE_RANGE`, by the reason.
    late_starts: Mapping[str, int] = field(default_factory=dict)

    def count(self, status: Status) -> int:
        return self.counts[status].rows

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
    def oldest_overdue_s(self) -> float:
        """How late the oldest overdue task is, or 0."""
        return 0.0 if self.oldest is None else max((self.now - self.oldest).total_seconds(), 0.0)

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
    def beat_age_s(self) -> float | None:
        return beat_age_s(self.workers)

    @property
    def broker_down_s(self) -> float | None:
        return broker_down_s(self.workers)

    @property
    def is_down(self) -> bool:
        """Whether the database does not answer."""
        return self.database.error is not None


def ask_broker(runtime: Runtime) -> str | None:
    """Return the error of the broker; None if it answers, or if there is none."""
    if runtime.direct_timer is not None:
        return None
    return broker_error(runtime.celery, runtime.settings.publish_limit_s)


def read_state(
    runtime: Runtime, error: str | None = None, most_counted: int = MAX_COUNTED
) -> DeploymentState:
    """Read the state. `error` is that of the broker, and that of the database is in the result."""
    store, settings, now = runtime.store, runtime.settings, runtime.clock.now()
    services = ServicesState(settings.timer_kind, settings.uses_broker, error)
    try:
        found = read_tables(store, settings, most_counted)
        rows = failed_rows(store.database, store.schema) if found.failed else []
        policies, held = with_counts(store.policies, found.policies)
    except StoreError as error:
        return DeploymentState(now, DatabaseState(store.database.shown_url, None, error), services)
    # Tasks may have moved between two queries. The sentences of the verdict contain the later
    # numbers, so the counts have them too.
    has_all, counts = has_all_failed(rows), dict(found.counts)
    if held is not None:
        counts[Status.HELD] = Count(held)
    if rows and has_all:
        counts[Status.FAILED] = Count(len(rows))
    counted: Sequence[CountedFailures] = ()
    last: Sequence[FailedRow] = ()
    late_starts: Mapping[str, int] = {}
    try:
        counted = recent_failures(runtime, now)
        last = rows_of(store.database, store.schema, [each.group.task_id for each in counted])
        late_starts = recent_late_starts(runtime, now)
    except StoreError:
        pass  # the tables of statistics may be missing; FAILED tasks are known without them
    return replace(
        found,
        services=services,
        counts=counts,
        policies=policies,
        groups=groups_of(rows, now, counted, last, has_more=not has_all),
        has_all_failures=has_all,
        late_starts=late_starts,
    )


def read_tables(
    store: Store, settings: Settings, most_counted: int = MAX_COUNTED
) -> DeploymentState:
    """Read what the tables say without failures, late starts and numbers of the policies.

    A number of tasks of a status that is larger than `most_counted` is the planner's estimate.
    """
    database, now = store.database, store.tasks.now()
    stats = Stats(database, store.schema)
    workers, policies = store.workers.registered(now, settings.silent_s), store.policies.read()
    counts = stats.counts(most_counted)
    rows, late = OverdueRows(database, store.schema), list[ExplainedGroup]()
    overdue = rows.count(settings.grace_s, most_counted)
    if overdue.tasks:
        running = running_by_tag(store)
        for group in rows.groups(settings.grace_s, MAX_EXPLAINED_GROUPS):
            late_s = max((now - group.oldest).total_seconds(), 0.0)
            reason = why_late(group, workers, policies, settings.namespace, running, now)
            late.append(
                ExplainedGroup(group.queue, group.tag, group.tasks, group.oldest, late_s, reason)
            )
        if len(late) < MAX_EXPLAINED_GROUPS:  # these are all overdue tasks
            oldest = min((group.oldest for group in late), default=None)
            overdue = OverdueCount(sum(group.tasks for group in late), oldest)
    return DeploymentState(
        now,
        DatabaseState(database.shown_url, stats.server(), problem=server_problem(database)),
        ServicesState(settings.timer_kind, settings.uses_broker),
        counts=counts,
        overdue=overdue.tasks,
        oldest=overdue.oldest,
        late=late,
        expired_leases=stats.expired_leases(),
        sweeps=stats.sweeps(settings, now),
        workers=workers,
        policies=policies,
        lost=store.workers.lost(),
    )
