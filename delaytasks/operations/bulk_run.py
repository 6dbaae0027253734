"""Cancels, reschedules or retries many tasks of one database in small steps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from delaytasks.core.batches import batches
from delaytasks.core.bulk import AuditEntry, BulkResult, Filter
from delaytasks.core.errors import StoreUnavailableError, TaskStateError
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, To
from delaytasks.core.task import DelayTask
from delaytasks.routing.shard import Shard

#: Rows in one transaction: few enough that locks on them are short.
BULK_ROWS = 500
#: Rows that other transactions have locked are tried again after this time.
BUSY_S = 1.0
EVENTS = {"cancel": "task.cancelled", "reschedule": "task.rescheduled", "retry": "task.retried"}


class BulkRun:
    """One bulk operation in one database."""

    def __init__(self, shard: Shard, which: Filter, to: To, events: Events) -> None:
        self._shard = shard
        self._store = shard.store.bulk
        self._events = events
        self._to = to
        self._ids = array("q")
        self._id: int | None = None
        self.matched = self._changed = self._refused = 0
        self.started = self._store.now()
        self._filter_as_given = which
        # Each task is shifted once. Tasks that changed since the start are left out, because one of
        # our own steps may have changed them and its answer was lost.
        if isinstance(to, timedelta):
            which = replace(
                which, updated_until=min(which.updated_until or self.started, self.started)
            )
        self._which = which

    def find(self) -> None:
        """Find the tasks. Running tasks are counted as refused."""
        for rows in self._store.matching(self._which):
            self._ids.extend(id for id, status in rows if status in self._which.movable)
            self._refused += sum(status not in self._which.movable for _, status in rows)
        self.matched = len(self._ids) + self._refused

    @property
    def result(self) -> BulkResult:
        runs = () if self._id is None else (self._id,)
        return BulkResult(self.matched, self._changed, self._refused, self.started, runs)

    def move(self, id: int, actor: str, report: Callable[[], object]) -> None:
        """Change the tasks step by step, and call `report` after each step.

        The audit row `id` has the counts of each step, also after a crash.
        """
        self._begin(id, actor)
        state = "failed"
        try:
            for _ in self._steps():
                report()
            state = "done"
        except (KeyboardInterrupt, SystemExit):
            state = "stopped"
            raise
        finally:
            self._end(id, state)

    def _begin(self, id: int, actor: str) -> None:
        which = self._filter_as_given.as_json()
        if self._to is not None:
            shift = self._to
            which["to"] = (
                f"{shift.total_seconds()} s" if isinstance(shift, timedelta) else shift.isoformat()
            )
        counts = (self.matched, self._changed, self._refused)
        move, started = self._which.move, self.started
        self._store.begin(
            AuditEntry(id, move, which, actor, "running", started, started, None, *counts)
        )
        self._id = id

    def _end(self, id: int, state: str) -> None:
        try:
            # After a failure, the counts that the steps stored are right, and ours may not be.
            self._store.end(id, state, self._done if state == "done" else None)
        except StoreUnavailableError:
            if state == "done":
                raise
            # Otherwise another error is being raised already, and the row stays "running".

    @property
    def _done(self) -> tuple[int, int]:
        return self._changed, self._refused

    # -- steps ------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[None]:
        busy: list[int] = []
        for ids in batches(self._ids, BULK_ROWS):
            busy += self._step(ids)
            yield
        if busy:
            time.sleep(BUSY_S)
        still_busy = 0
        for ids in batches(busy, BULK_ROWS):
            still_busy += len(self._step(ids))
            yield
        self._refused += still_busy

    def _step(self, ids: Sequence[int]) -> list[int]:
        """Change the tasks with these ids; return the ids that other transactions have locked."""
        assert self._id is not None
        step = self._store.step(self._id, self._which, ids, self._to, self._done)
        self._changed += len(step.moved)
        self._refused += step.refused
        self._update_timer(step.moved)
        if step.moved:
            self._events.emit(EVENTS[self._which.move], count=len(step.moved))
        if step.keyed:
            self._retry_keyed_tasks(step.keyed)
            self._store.note(self._id, self._done)
        return step.busy

    def _update_timer(self, moved: Sequence[Entry]) -> None:
        if moved and self._which.move == "cancel":
            self._shard.producer.disarm_entries(moved)
        elif moved:
            self._shard.producer.arm_entries(moved)

    def _retry_keyed_tasks(self, keyed: Iterable[tuple[int, int]]) -> None:
        """Retry tasks with a key one by one; another database may decide about the key."""
        assert isinstance(self._to, datetime)
        retried: list[DelayTask] = []
        for id, version in keyed:
            try:
                retried.append(self._shard.retry(id, self._to, version))
            except TaskStateError:  # another task has the key, or this task has changed
                self._refused += 1
            except StoreUnavailableError as error:
                if error.shard in (None, self._shard.number):
                    raise
                self._refused += 1  # the shard that decides about the key is down
        self._changed += len(retried)
        if retried:
            self._shard.producer.arm(retried)
            self._events.emit(EVENTS["retry"], count=len(retried))
