"""Counts the present tasks by queue, tag and worker, for `delaytasks status`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from delaytasks.db.store import Store
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.moves import Status
from delaytasks.operate.state_queries import Live, LiveRow, LiveRows
from delaytasks.settings import Settings


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


@dataclass(frozen=True)
class LiveSnapshot:
    """The counts of one time."""

    total: LiveGroup
    queues: Sequence[LiveGroup]
    tags: Sequence[LiveGroup]
    #: The tasks that the processes of each worker run, by the worker's name.
    running_of: Mapping[str, int]
    #: Whether there are more tasks than were read, so that the counts are too small.
    is_capped: bool


def snapshot(store: Store, settings: Settings) -> LiveSnapshot:
    """Read what happens now."""
    return _Reading(store, settings).snapshot()


class _Reading:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._total = LiveGroup("")
        self._queues: dict[str, LiveGroup] = {}
        self._tags: dict[str, LiveGroup] = {}
        self._running_of: dict[str, int] = {}

    def _add_rows(self, live: Live) -> None:
        for row in live.running:
            self._count(row, _running)
            process = row.worker or ""
            worker = process.rpartition("/")[0] or process
            self._running_of[worker] = self._running_of.get(worker, 0) + 1
        grace_s, now = self._settings.grace_s, live.now
        for row in live.waiting:
            self._count(row, lambda group, row: _waiting(group, row, now, grace_s))
        for row in live.held:
            self._count(row, _held)
        for row in live.ended:
            self._count(row, _ended)

    def _count(self, row: LiveRow, add: Callable[[LiveGroup, LiveRow], None]) -> None:
        for group in (self._total, _of(self._queues, row.queue), _of(self._tags, row.tag)):
            add(group, row)

    def snapshot(self) -> LiveSnapshot:
        store, settings = self._store, self._settings
        live = LiveRows(store.database, store.schema).read(settings.grace_s)
        self._add_rows(live)
        for policy in store.policies.read():
            groups = self._tags if policy.kind == "tag" else self._queues
            if policy.is_paused:
                _of(groups, policy.name).is_paused = True
        workers = store.workers.registered(live.now, settings.silent_s)
        alive = [worker for worker in workers if worker.is_alive]
        for name in {queue for worker in alive for queue in worker.queues} - {ALL_QUEUES}:
            _of(self._queues, name)  # a queue without tasks is shown as well
        for group in self._queues.values():
            group.workers = sum(worker.serves(group.name) for worker in alive)
        for group in self._tags.values():
            group.workers = sum(group.name in (worker.tags or ()) for worker in alive)
        return LiveSnapshot(
            total=self._total,
            queues=_ordered(self._queues.values()),
            tags=_ordered(self._tags.values()),
            running_of=self._running_of,
            is_capped=live.is_capped,
        )


def _of(groups: dict[str, LiveGroup], name: str) -> LiveGroup:
    return groups.setdefault(name, LiveGroup(name))


def _ordered(groups: Iterable[LiveGroup]) -> list[LiveGroup]:
    """Return the groups with overdue tasks first, and then those with the most to do."""
    return sorted(
        groups,
        key=lambda one: (-one.overdue, -one.running, -one.ended - one.soon - one.held, one.name),
    )


def _running(group: LiveGroup, row: LiveRow) -> None:
    group.running += 1
    _late(group, row)


def _waiting(group: LiveGroup, row: LiveRow, now: datetime, grace_s: float) -> None:
    late_s = (now - row.due).total_seconds()
    if late_s > grace_s:
        group.overdue += 1
        group.oldest_overdue_s = max(group.oldest_overdue_s, late_s)
    else:
        group.soon += 1


def _held(group: LiveGroup, row: LiveRow) -> None:
    group.held += 1


def _ended(group: LiveGroup, row: LiveRow) -> None:
    group.ended += 1
    group.failed += row.status is Status.FAILED
    if row.status is not Status.CANCELLED:
        _late(group, row)


def _late(group: LiveGroup, row: LiveRow) -> None:
    if row.execution_time is not None:
        group.latenesses.append(max((row.execution_time - row.due).total_seconds(), 0.0))
