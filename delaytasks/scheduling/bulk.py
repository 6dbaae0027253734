"""Many tasks cancelled, rescheduled or retried in one database: found first, then moved in small steps."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.core.bulk import AuditEntry, BulkResult, Filter
from delaytasks.core.errors import StoreUnavailableError, TaskStateError
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, To
from delaytasks.core.task import DelayTask
from delaytasks.scheduling.producer import Producer

if TYPE_CHECKING:
    from delaytasks.storage.bulk import Bulk

#: Rows in one step's transaction: nobody waits for their locks.
STEP = 500
#: Rows that somebody has locked get another chance after so long.
BUSY_S = 1.0
EVENTS = {"cancel": "task.cancelled", "reschedule": "task.rescheduled", "retry": "task.retried"}
#: Retries one task that must have its key again: (id, due time, version).
RetryKeyed = Callable[[int, datetime, int], DelayTask]


class BulkRun:
    """One run, on one database."""

    def __init__(
        self,
        store: Bulk,
        producer: Producer,
        events: Events,
        shard: int,
        which: Filter,
        to: To,
        retry_keyed: RetryKeyed,
    ) -> None:
        self._store = store
        self._producer = producer
        self._events = events
        self._shard = shard
        self._to = to
        self._retry_keyed = retry_keyed
        self._ids = array("q")
        self._id: int | None = None
        self.matched = self._changed = self._refused = 0
        self.started = store.now()
        self._asked = which
        # A task is shifted once: what moved since the start is left, were it by a step of ours whose answer was lost.
        if isinstance(to, timedelta):
            which = replace(
                which, updated_until=min(which.updated_until or self.started, self.started)
            )
        self._which = which

    def find(self) -> None:
        """Which tasks are meant. Those that run are counted, and left alone."""
        for rows in self._store.matching(self._which):
            self._ids.extend(id for id, status in rows if status in self._which.movable)
            self._refused += sum(status not in self._which.movable for _, status in rows)
        self.matched = len(self._ids) + self._refused

    @property
    def result(self) -> BulkResult:
        runs = () if self._id is None else (self._id,)
        return BulkResult(self.matched, self._changed, self._refused, self.started, runs)

    def move(self, id: int, actor: str, tell: Callable[[], object]) -> None:
        """In steps; `tell` is called after each. The audit row `id` says how far it came, whatever happens."""
        self._begin(id, actor)
        state = "failed"
        try:
            for _ in self._steps():
                tell()
            state = "done"
        except (KeyboardInterrupt, SystemExit):
            state = "stopped"
            raise
        finally:
            self._end(id, state)

    def _begin(self, id: int, actor: str) -> None:
        which = self._asked.as_json()
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
            # What the steps have counted is true, whatever happened before we counted it as well.
            self._store.end(id, state, self._done if state == "done" else None)
        except StoreUnavailableError:
            if state == "done":
                raise
            # Else there is an error already; the row says "running", and nobody sees it move.

    @property
    def _done(self) -> tuple[int, int]:
        return self._changed, self._refused

    # -- steps ------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[None]:
        busy: list[int] = []
        for ids in _lots(self._ids):
            busy += self._step(ids)
            yield
        if busy:
            time.sleep(BUSY_S)
        still_busy = 0
        for ids in _lots(busy):
            still_busy += len(self._step(ids))
            yield
        self._refused += still_busy

    def _step(self, ids: Sequence[int]) -> list[int]:
        """Those that somebody has locked."""
        assert self._id is not None
        step = self._store.step(self._id, self._which, ids, self._to, self._done)
        self._changed += len(step.moved)
        self._refused += step.refused
        self._tell_timer(step.moved)
        if step.moved:
            self._events.emit(EVENTS[self._which.move], count=len(step.moved))
        if step.keyed:
            self._retry_those(step.keyed)
            self._store.note(self._id, self._done)
        return step.busy

    def _tell_timer(self, moved: Sequence[Entry]) -> None:
        if moved and self._which.move == "cancel":
            self._producer.disarm_entries(moved)
        elif moved:
            self._producer.arm_entries(moved)

    def _retry_those(self, keyed: Iterable[tuple[int, int]]) -> None:
        """One by one: each must have its key again, for which another database may have to be asked."""
        assert isinstance(self._to, datetime)
        retried: list[DelayTask] = []
        for id, version in keyed:
            try:
                retried.append(self._retry_keyed(id, self._to, version))
            except TaskStateError:  # another task has its key, or it moved on
                self._refused += 1
            except StoreUnavailableError as error:
                if error.shard in (None, self._shard):
                    raise
                self._refused += 1  # who decides about its key is down
        self._changed += len(retried)
        if retried:
            self._producer.arm(retried)
            self._events.emit(EVENTS["retry"], count=len(retried))


def _lots(ids: Sequence[int]) -> Iterator[list[int]]:
    each = iter(ids)
    while batch := list(itertools.islice(each, STEP)):
        yield batch
