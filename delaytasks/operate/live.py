"""Counts the present tasks by queue, tag and worker, for `delaytasks status`.

The rows that matter now run, are overdue, due soon or held, or have ended lately. Each part of a
read looks at a bounded number of rows through an index, so the cost does not grow with the table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, select

from delaytasks.db.store import Store
from delaytasks.db.task_rows import has_status, levels_of, queues_after
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.moves import FINISHED, Status
from delaytasks.operate.state import DeploymentState
from delaytasks.operate.state_queries import OverdueRows
from delaytasks.settings import Settings

#: The rows that each part of a read looks at.
MOST_ROWS = 5_000
#: Queues among which waiting rows are looked for.
MOST_QUEUES = 100
#: "Soon" and "lately" are a minute.
PERIOD = timedelta(minutes=1)


class LiveRow(NamedTuple):
    """The columns of a row that matter here."""

    queue: str
    tag: str
    worker: str | None
    status: int
    expected_time: datetime
    due_time: datetime | None
    execution_time: datetime | None


@dataclass
class LiveGroup:
    """The tasks of one queue or tag."""

    name: str
    running: int = 0
    #: Waiting tasks that are late by more than the grace period.
    overdue: int = 0
    oldest_overdue_s: float = 0.0
    #: Tasks that are due within a minute.
    soon: int = 0
    held: int = 0
    #: Tasks that were due within the last minute and have ended.
    ended: int = 0
    failed: int = 0
    #: The latenesses of these tasks and of the running ones.
    latenesses: list[float] = field(default_factory=list)
    is_paused: bool = False
    #: Live workers that serve the queue, or have a processor for the tag.
    workers: int = 0

    def add(self, row: LiveRow, now: datetime, grace_s: float) -> None:
        due = row.due_time or row.expected_time
        late_s = (now - due).total_seconds()
        match row.status:
            case Status.RUNNING:
                self.running += 1
            case Status.HELD:
                self.held += 1
            case Status.NOT_COMPLETE if late_s > grace_s:
                self.overdue += 1
                self.oldest_overdue_s = max(self.oldest_overdue_s, late_s)
            case Status.NOT_COMPLETE:
                self.soon += 1
            case _:
                self.ended += 1
                self.failed += row.status == Status.FAILED
        has_run = row.status in (Status.RUNNING, Status.DONE, Status.FAILED)
        if has_run and row.execution_time is not None:
            self.latenesses.append(max((row.execution_time - due).total_seconds(), 0.0))

    def lateness(self, share: float) -> float | None:
        """Return the lateness that `share` of the runs do not exceed; None without runs."""
        if not self.latenesses:
            return None
        ordered = sorted(self.latenesses)
        return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        del document["latenesses"]
        for share in (50, 99):
            late_s = self.lateness(share / 100)
            document[f"lateness_p{share}_s"] = None if late_s is None else round(late_s, 4)
        return {**document, "oldest_overdue_s": round(self.oldest_overdue_s, 3)}


class LiveSnapshot(NamedTuple):
    """The counts of one time."""

    total: LiveGroup
    queues: Sequence[LiveGroup]
    tags: Sequence[LiveGroup]
    #: The tasks that the processes of each worker run, by the worker's name.
    running_of: Mapping[str, int]
    #: Whether there are more tasks than were read, so that the counts are too small.
    is_capped: bool


def snapshot(store: Store, settings: Settings, state: DeploymentState) -> LiveSnapshot:
    """Read what happens now. `state` has the workers and the policies."""
    now, grace_s = store.tasks.now(), settings.grace_s
    total, queues, tags = LiveGroup(""), dict[str, LiveGroup](), dict[str, LiveGroup]()
    running_of, is_capped = Counter[str](), False
    for rows in store.database.autocommitted(lambda on: list(live_rows(store, on, now, grace_s))):
        is_capped |= len(rows) >= MOST_ROWS
        for row in filter(None, rows):
            for group in (total, _of(queues, row.queue), _of(tags, row.tag)):
                group.add(row, now, grace_s)
            if row.status == Status.RUNNING:
                process = row.worker or ""
                running_of[process.rpartition("/")[0] or process] += 1
    for policy in state.paused:
        _of(tags if policy.kind == "tag" else queues, policy.name).is_paused = True
    for name in {queue for worker in state.alive for queue in worker.queues} - {ALL_QUEUES}:
        _of(queues, name)  # a queue without tasks is shown as well
    for group in queues.values():
        group.workers = len(state.serving(group.name))
    for group in tags.values():
        group.workers = sum(group.name in (worker.tags or ()) for worker in state.alive)
    return LiveSnapshot(
        total, _ordered(queues.values()), _ordered(tags.values()), running_of, is_capped
    )


def live_rows(
    store: Store, connection: Connection, now: datetime, grace_s: float
) -> Iterator[Sequence[LiveRow | None]]:
    """Yield the rows of each part, at most `MOST_ROWS`. None are rows of another part."""
    tasks, t = store.schema.tasks, store.schema.tasks.c
    columns = [t[name] for name in LiveRow._fields]

    def read(*where: ColumnElement[bool], order: Any = None) -> list[LiveRow]:
        query = select(*columns).where(*where).limit(MOST_ROWS)
        found = connection.execute(query if order is None else query.order_by(order))
        return [LiveRow._make(row) for row in found]

    yield read(has_status(tasks, Status.RUNNING))
    yield read(has_status(tasks, Status.HELD))
    waits, soon = has_status(tasks, Status.NOT_COMPLETE), now + PERIOD
    for queue in queues_after(connection, tasks, Status.NOT_COMPLETE, None, MOST_QUEUES):
        for level in levels_of(connection, tasks, Status.NOT_COMPLETE, queue):
            of_level = t.queue == queue, t.priority == level.priority, t.expected_time <= soon
            yield read(waits, *of_level, order=t.expected_time)
    # Overdue rows that a worker has deferred for longer than a minute.
    deferred = OverdueRows(store.database, store.schema).deferred(grace_s)
    yield read(deferred, t.expected_time > soon)
    lately = t.expected_time > now - PERIOD, t.expected_time <= now
    due = read(*lately, order=t.expected_time.desc())
    # The others are in the parts above. More conditions would make the database read more rows.
    yield [row if row.status in FINISHED else None for row in due]


def _of(groups: dict[str, LiveGroup], name: str) -> LiveGroup:
    return groups.setdefault(name, LiveGroup(name))


def _ordered(groups: Iterable[LiveGroup]) -> list[LiveGroup]:
    """Return the groups with overdue tasks first, and then those with the most to do."""
    return sorted(
        groups,
        key=lambda one: (-one.overdue, -one.running, -one.ended - one.soon - one.held, one.name),
    )
