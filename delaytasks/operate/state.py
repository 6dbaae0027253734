"""One bounded snapshot of a deployment: workers, queues, overdue and failed tasks.

The console, `delaytasks status`, `status --watch` and the exporter read it here, so that they
show the same numbers. `health.py` judges it. Each query reads a bounded number of rows, or one for
each queue and priority.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, func, literal, null, select

from delaytasks.broker.link import broker_error
from delaytasks.db.database import Database
from delaytasks.db.schema import COLUMNS, Schema, by_id, listed
from delaytasks.db.statements import task_of
from delaytasks.db.store import Store
from delaytasks.db.sweep_queries import is_late
from delaytasks.db.task_rows import distinct_values, first_page, has_status, levels_of
from delaytasks.db.types import db_now_plus, for_database, once
from delaytasks.model.clock import to_us
from delaytasks.model.filters import Filter
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.moves import Status
from delaytasks.model.policies import Policy
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import DEFER_MAX_S
from delaytasks.operate.policy_calls import with_counts
from delaytasks.operate.statistics import (
    LATE_RANGE,
    FailureGroup,
    RunTotals,
    counts_by_tag,
    failure_groups,
    groups_by_last,
)
from delaytasks.operate.why import Facts, Reason, waits_for
from delaytasks.run.observers import RunCounts, error_pattern

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


# -- The numbers of tasks by status ---------------------------------------------------------------


#: Up to this number, rows are counted exactly.
MAX_COUNTED = 1_000_000


def task_counts(store: Store, most: int = MAX_COUNTED) -> dict[str, int]:
    """Return the number of rows by the name of the status.

    In a table of more than `most` rows, larger numbers and that of DONE are the planner's
    estimates.
    """
    t = store.schema.tasks

    def count(on: Connection, status: Status) -> int:
        rows, counted = select(t.c.id).where(has_status(t, status)), 0
        if status is not Status.DONE:  # it has no index
            first = rows.limit(most + 1).subquery()
            counted = on.scalar(select(func.count()).select_from(first)) or 0
            if counted <= most:
                return counted
        return max(counted, estimate_rows(on, rows))

    def read(on: Connection) -> dict[str, int]:
        if estimate_rows(on, select(t.c.id)) > most:
            return {status.name: count(on, status) for status in Status}
        query = select(t.c.status, func.count()).group_by(t.c.status)
        found = {int(status): rows for status, rows in on.execute(query)}
        return {status.name: found.get(int(status), 0) for status in Status}

    return store.database.autocommitted(read)


def estimate_rows(connection: Connection, query: Select[Any]) -> int:
    """Return the planner's estimate of how many rows a query returns, whose cost does not grow with
    the rows. SQLite has no estimates and returns 0: its tables are small enough to count."""
    dialect, postgresql = connection.dialect, "EXPLAIN (FORMAT JSON)"
    words = for_database(dialect.name, postgresql=postgresql, mysql="EXPLAIN", sqlite="")
    if not words:
        return 0
    sql = query.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    found = connection.exec_driver_sql(f"{words} {sql}").mappings().one()
    if "QUERY PLAN" in found:
        return int(found["QUERY PLAN"][0]["Plan"]["Plan Rows"])
    return int(found["rows"] or 0)


# -- The server of the database -------------------------------------------------------------------


READ_ONLY = "it is read-only, as a standby or a demoted primary is: no task can change"
NO_STANDBY = "it replicates synchronously, and no synchronous standby is connected"
#: Queries whose first value says whether the server is a standby, whether it replicates
#: synchronously, and whether a synchronous standby is connected. A role without pg_monitor sees
#: NULL for the state of each standby.
_POSTGRESQL_ROLE = (
    "SELECT current_setting('transaction_read_only') = 'on'",
    "SELECT current_setting('synchronous_standby_names') <> ''",
    "SELECT 1 FROM pg_stat_replication WHERE COALESCE(sync_state, 'sync') IN ('sync', 'quorum')",
)
_MYSQL_ROLE = (
    "SELECT @@global.read_only",
    "SHOW GLOBAL VARIABLES WHERE variable_name IN "
    "('rpl_semi_sync_master_enabled', 'rpl_semi_sync_source_enabled') AND value = 'ON'",
    "SHOW GLOBAL STATUS WHERE variable_name IN "
    "('Rpl_semi_sync_master_clients', 'Rpl_semi_sync_source_clients') AND value <> '0'",
)


def server_problem(database: Database) -> str | None:
    """Return what is wrong with the role of the server: `READ_ONLY`, `NO_STANDBY` or None."""
    queries: Sequence[str] = for_database(
        database.backend, postgresql=_POSTGRESQL_ROLE, mysql=_MYSQL_ROLE, sqlite=()
    )

    def read(connection: Connection) -> list[bool]:
        return [bool(connection.exec_driver_sql(query).scalar()) for query in queries]

    match database.autocommitted(read):
        case [True, *_]:
            return READ_ONLY
        case [_, True, False]:
            return NO_STANDBY
    return None


def _server(connection: Connection) -> str:
    """Return the database's kind and version."""
    numbers = connection.dialect.server_version_info or ()
    return f"{connection.dialect.name} {'.'.join(map(str, numbers))}".strip()


# -- Finds the overdue tasks. This is the only definition of the word in SQL ----------------------

# A waiting task is overdue if it is late by more than the grace period. A task that a worker has
# deferred keeps its due time in `due_time`, while its next try is at `expected_time`. It is
# overdue, too, although no sweep and no claim look for it yet. A deferral is not longer than
# `DEFER_MAX_S`, which bounds the rows to read.


#: Queues in which overdue tasks are counted, and priorities of each.
MAX_OVERDUE_QUEUES = 1_000
#: The groups with the most tasks, which have reasons.
MAX_EXPLAINED_GROUPS = 20


class OverdueGroup(NamedTuple):
    """Overdue tasks of one queue and tag, and the reason why one of them has not begun."""

    queue: str
    tag: str
    tasks: int
    oldest: datetime
    #: The lateness of the oldest task.
    late_s: float
    reason: Reason


class Overdue(NamedTuple):
    """How many tasks are overdue, and when the first of them was due."""

    tasks: int
    oldest: datetime | None
    #: Queue, tag, number, first due time and an id of each of the largest groups.
    groups: Sequence[tuple[str, str, int, datetime, int]]


def find_overdue(store: Store, late_s: float) -> Overdue:
    """Count up to `MAX_COUNTED` tasks that are late by more than `late_s`."""
    t = store.schema.tasks
    due = func.coalesce(t.c.due_time, t.c.expected_time).label("due")
    rows = select(t.c.queue, t.c.tag, due, t.c.id).order_by(t.c.expected_time)

    def largest(on: Connection, some: Select[Any]) -> Sequence[Any]:
        """Return the largest groups, each of which has the values of all groups, too."""
        c = some.subquery().c
        tasks, oldest = func.count(), func.min(c.due)
        of_all = func.sum(tasks).over().label("total"), func.min(oldest).over().label("first")
        query = select(c.queue, c.tag, tasks, oldest, func.min(c.id), *of_all)
        query = query.where(c.due <= once(db_now_plus(-late_s))).group_by(c.queue, c.tag)
        return on.execute(query.order_by(tasks.desc()).limit(MAX_EXPLAINED_GROUPS)).all()

    def work(on: Connection) -> list[Sequence[Any]]:
        # Up to that many tasks with their next try within the longest deferral are read.
        tried_soon, left = rows.where(_is_tried_soon(t, late_s)), MAX_COUNTED
        parts = [largest(on, tried_soon.limit(left))]
        # The index has the due times in order within a queue and a priority. Without them, all
        # waiting rows would be read.
        queues = distinct_values(on, t.c.queue, has_status(t, Status.NOT_COMPLETE))
        some = islice(queues, MAX_OVERDUE_QUEUES)
        for level in chain.from_iterable(levels_of(on, t, Status.NOT_COMPLETE, q) for q in some):
            if part := largest(on, rows.where(is_late(t, level, late_s)).limit(left)):
                parts.append(part)
                left -= int(part[0].total)
            if left <= 0:
                break
        return parts

    parts = [part for part in store.database.autocommitted(work) if part]
    merged = dict[tuple[str, str], tuple[int, datetime, int]]()
    for queue, tag, tasks, oldest, id, *_ in chain.from_iterable(parts):
        known, known_oldest, sample = merged.get((queue, tag), (0, oldest, id))
        merged[queue, tag] = known + tasks, min(known_oldest, oldest), min(sample, id)
    groups = [(*names, *numbers) for names, numbers in merged.items()]
    groups.sort(key=lambda group: -group[2])
    number = min(sum(int(part[0].total) for part in parts), MAX_COUNTED)
    oldest_of_all = min((part[0].first for part in parts), default=None)
    return Overdue(number, oldest_of_all, groups[:MAX_EXPLAINED_GROUPS])


def _is_tried_soon(t: Table, late_s: float) -> ColumnElement[bool]:
    """The condition for waiting tasks whose next try is not late, and is within a deferral."""
    return and_(
        has_status(t, Status.NOT_COMPLETE),
        t.c.expected_time > once(db_now_plus(-late_s)),
        t.c.expected_time <= once(db_now_plus(DEFER_MAX_S)),
    )


def explained(facts: Facts, overdue: Overdue) -> list[OverdueGroup]:
    """Return the groups with the reasons why one of their tasks has not begun."""
    samples = {task.id: task for task in tasks_of_ids(facts.store, [g[-1] for g in overdue.groups])}
    groups = list[OverdueGroup]()
    for queue, tag, tasks, oldest, id in overdue.groups:
        if id in samples:
            late_s = max((facts.now - oldest).total_seconds(), 0.0)
            reason = waits_for(facts, samples[id])[0]
            groups.append(OverdueGroup(queue, tag, tasks, oldest, late_s, reason))
    return groups


# -- Tasks without their bodies and results, which may be large ------------------------------------


#: The most tasks that `failed_tasks` reads, and the most queues: each costs a query.
MOST_FAILED, MOST_FAILED_QUEUES = 500, 100


def _without_bodies(schema: Schema) -> Select[Any]:
    without: dict[str, Any] = {"message_body": literal(""), "result": null()}
    names = ((name, without.get(name, schema.tasks.c[name])) for name in COLUMNS)
    return select(*(column.label(name) for name, column in names))


def failed_tasks(store: Store) -> list[DelayedTask]:
    """Return the FAILED tasks that were due last, at most `MOST_FAILED` of the first queues."""
    query, where = _without_bodies(store.schema), Filter(status=frozenset({Status.FAILED}))
    limits = MOST_FAILED, True, MOST_FAILED_QUEUES
    rows = store.database.autocommitted(
        lambda on: first_page(on, query, store.schema.tasks, where, *limits)
    )
    return [task_of(row, store.schema) for row in rows]


def tasks_of_ids(store: Store, ids: Iterable[int]) -> list[DelayedTask]:
    """Return the tasks with these ids that exist, whatever their status is."""
    wanted, t = sorted(set(ids)), store.schema.tasks
    if not wanted:
        return []
    # The range lets the planner leave out partitions. An order of due times could make MySQL read
    # the index of all past rows.
    where = (listed(store.database, t.c.id, "ids"), t.c.id.between(wanted[0], wanted[-1]))
    query = by_id(_without_bodies(store.schema).where(*where), t)
    rows = store.database.autocommitted(lambda on: on.execute(query, {"ids": wanted}).all())
    return [task_of(row, store.schema) for row in rows]


def changed_at(task: DelayedTask) -> datetime:
    return task.update_time or task.create_time or task.expected_time


# -- Groups of failures that have the same tag and the same kind of error -------------------------

#: The most groups of failed runs of which it is asked whether their last task is repeated.
MOST_RETRIED = 100
#: The statuses of a task that has failed and is repeated.
RETRIED = (Status.NOT_COMPLETE, Status.HELD, Status.RUNNING)


def groups_of(tasks: Iterable[DelayedTask]) -> list[FailureGroup]:
    """Return the groups of FAILED tasks, those that failed last first. `runs` counts the tasks."""
    counted = defaultdict[tuple[str, str], RunCounts](RunCounts)
    for task in sorted(tasks, key=lambda task: (changed_at(task), task.id)):
        error, at_us = task.error or "", to_us(changed_at(task))
        pattern = error_pattern(error)
        example = RunCounts(failed=1, pattern=pattern, task_id=task.id, error=error)
        counted[task.tag, pattern].add({**example, "first_us": at_us, "last_us": at_us})
    return groups_by_last(FailureGroup.of(tag, counts) for (tag, _), counts in counted.items())


# -- The state of a deployment --------------------------------------------------------------------


class DeploymentState(Facts):
    """The state of the tables, read at once. `add_failures` reads more of them."""

    #: Why the broker does not answer, if it was asked.
    broker_error: str | None = None

    def __init__(self, runtime: Runtime, most_counted: int = MAX_COUNTED) -> None:
        """A number of tasks of a status that is larger than `most_counted` is the planner's
        estimate."""
        super().__init__(runtime)
        for name in ("workers", "policies", "sweeps"):
            getattr(self, name)  # now, and not when somebody looks at them
        store, database = self.store, self.store.database
        #: The kind and the version of the database, and what is wrong with its role.
        self.server = database.autocommitted(_server)
        self.problem = server_problem(database)
        #: The number of tasks by the name of the status.
        self.rows = task_counts(store, most_counted)
        found = find_overdue(store, self.settings.grace_s)
        #: The number of overdue tasks, and when the oldest of them was due.
        self.overdue, self.oldest = found.tasks, found.oldest
        #: The largest groups of overdue tasks, with the reasons why they have not begun.
        self.late = explained(self, found)
        self.expired_leases = store.leases.count_expired()
        #: The workers that were lost within the last hour, the latest loss first.
        self.lost = store.workers.lost()
        #: FAILED tasks with the same tag and kind of error, and whether all of them were read.
        self.groups: Sequence[FailureGroup] = ()
        self.has_all_failures = True
        #: Failed runs of the last two days, the last one of which waits for its retry.
        self.retried: Sequence[FailureGroup] = ()
        #: What ended within `LATE_RANGE`, by tag.
        self.runs: Mapping[str, RunTotals] = {}

    def add_failures(self) -> None:
        """Read the failures, the latest runs, and the numbers of tasks of the policies."""
        store = self.store
        failed = failed_tasks(store) if self.rows["FAILED"] else []
        self.has_all_failures = len(failed) >= self.rows["FAILED"]
        self.policies, held = with_counts(store.policies, self.policies)
        # Tasks may have moved between two queries. The sentences of the verdict contain the later
        # numbers, so the counts have them too.
        if held is not None:
            self.rows["HELD"] = held
        if failed and self.has_all_failures:
            self.rows["FAILED"] = len(failed)
        self.groups = groups_of(failed)
        counted = failure_groups(store)[:MOST_RETRIED]
        last = tasks_of_ids(store, [group.task_id for group in counted])
        waiting = {task.id for task in last if task.status in RETRIED}
        self.retried = [group for group in counted if group.task_id in waiting]
        self.runs = counts_by_tag(store, self.now - LATE_RANGE, self.now)

    @property
    def oldest_overdue_s(self) -> float:
        """How late the oldest overdue task is, or 0."""
        return 0.0 if self.oldest is None else max((self.now - self.oldest).total_seconds(), 0.0)

    @property
    def paused(self) -> list[Policy]:
        return [policy for policy in self.policies if policy.is_paused]


def ask_broker(runtime: Runtime) -> str | None:
    """Return the error of the broker; None if it answers, or if there is none."""
    if runtime.direct_timer is not None:
        return None
    return broker_error(runtime.celery, runtime.settings.publish_limit_s)


# -- What happens now, by queue and tag -----------------------------------------------------------


@dataclass
class LiveGroup:
    """The present tasks of one queue or tag."""

    name: str
    is_paused: bool = False
    running: int = 0
    #: Its tasks in the largest groups of overdue ones.
    overdue: int = 0
    oldest_overdue_s: float = 0.0
    #: Live workers that serve the queue, or have a processor for the tag.
    workers: int = 0


def live_groups(state: DeploymentState) -> dict[str, list[LiveGroup]]:
    """Return the queues and the tags with running or overdue tasks, with a pause, with a worker
    (the queues) or with runs of the last minutes (the tags).

    Those with overdue tasks come first, and then those with the most running ones.
    """
    served = {queue for worker in state.alive for queue in worker.queues} - {ALL_QUEUES}
    found = {
        "queue": {name: LiveGroup(name) for name in served},
        "tag": {name: LiveGroup(name) for name in state.runs},
    }

    def of(queue: str, tag: str) -> list[LiveGroup]:
        names = {"queue": queue, "tag": tag}
        return [found[kind].setdefault(name, LiveGroup(name)) for kind, name in names.items()]

    for (tag, queue), running in state.store.policies.count(Status.RUNNING).items():
        for group in of(queue, tag):
            group.running += running.rows
    for late in state.late:
        for group in of(late.queue, late.tag):
            group.overdue += late.tasks
            group.oldest_overdue_s = max(group.oldest_overdue_s, late.late_s)
    for policy in state.paused:
        found[policy.kind].setdefault(policy.name, LiveGroup(policy.name)).is_paused = True
    for group in found["queue"].values():
        group.workers = len(state.serving(group.name))
    for group in found["tag"].values():
        group.workers = sum(group.name in (worker.tags or ()) for worker in state.alive)
    return {kind: sorted(groups.values(), key=_urgency) for kind, groups in found.items()}


def _urgency(group: LiveGroup) -> tuple[int, int, str]:
    return -group.overdue, -group.running, group.name
