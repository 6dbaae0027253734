"""Hold the waiting rows of paused tags and queues, and release them after the pause, in steps.

Each change of a policy starts a walk over the waiting rows (or the held ones), level by level, with
the due rows first. A walk takes only a part of each sweep and continues in the next one. If its
worker dies, the policy stays unapplied, and the next worker starts a new walk. A row that is
scheduled behind a walk is held when it comes within the horizon, or when a worker claims it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.core.clock import UTC, Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.filters import batches
from delaytasks.core.interfaces import FoundRow, Level, Timer
from delaytasks.core.policies import Policies, Policy
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.execution.policy_cache import PolicyCache
from delaytasks.maintenance.drain_requests import OnStep

if TYPE_CHECKING:
    from delaytasks.storage.paused_rows import PausedRows
    from delaytasks.storage.policies import PolicyTable

#: Rows that one statement holds or releases.
PAUSE_ROWS = 500
#: The last instant that a row can have as its due time.
LATEST_DUE = datetime.max.replace(tzinfo=UTC)
#: The part of a sweep interval that a walk may take.
SHARE = 0.4
#: Seconds between two checks for rows that are held although nothing pauses them. A worker that was
#: suspended in the middle of a step leaves such rows.
STRAYS_S = 60.0
#: Seconds after which a worker deletes policies without content again. Each process that has read
#: such a policy then reads all policies anew.
FORGET_S = 3600.0
#: Policies that one transaction marks as applied.
APPLIED = 200


class PauseSweeper:
    """Applies the pauses of one database's policies to its rows, as a part of each sweep."""

    def __init__(
        self,
        settings: Settings,
        cache: PolicyCache,
        table: PolicyTable,
        rows: PausedRows,
        clock: Clock,
        timer: Timer,
        events: Events,
    ) -> None:
        self.cache = cache
        self._table = table
        self._rows = rows
        self._clock = clock
        self._timer = timer
        self._events = events
        self._horizon = timedelta(seconds=settings.horizon_s or 0)
        self._budget_s = settings.sweep_s * SHARE
        #: The walk in progress, and the policies for which it was started.
        self._walk: Iterator[None] | None = None
        self._walk_policies: Sequence[Policy] = ()
        #: False if the walk could not release a row, because another transaction had locked it.
        self._is_complete = True
        self._strays_checked_at = float("-inf")
        self._forget_at = monotonic() + FORGET_S

    def hold_near(
        self, policies: Policies, since: datetime, until: datetime, on_step: OnStep
    ) -> None:
        """Hold paused rows that came within the horizon, until the time budget is used up.

        Claims hold the remaining rows.
        """
        deadline = monotonic() + self._budget_s
        while policies.has_pauses and monotonic() < deadline:
            on_step()
            ids = self._rows.due_between(since, until)
            if not ids or not self._hold(ids):
                return

    def walk(self, policies: Policies, on_step: OnStep) -> None:
        """Continue the walk that holds and releases rows, or start one if policies have changed."""
        unapplied = list(policies.unapplied.values())
        releases = any(not policy.is_paused for policy in unapplied) or self._has_strays(policies)
        if self._walk is None and not unapplied and not releases:
            return
        if self._walk is None or self._walk_policies != unapplied:
            self._walk = self._steps(policies, unapplied, releases)
            self._walk_policies, self._is_complete = unapplied, True
        deadline = monotonic() + self._budget_s
        for _ in self._walk:
            on_step()
            if monotonic() > deadline:
                return
        self._walk = None
        self._forget_empty_policies()
        if self._is_complete:
            for batch in batches(unapplied, APPLIED):
                self._table.applied(batch)
                on_step()

    def _has_strays(self, policies: Policies) -> bool:
        """Check, once in a while, for held rows that no policy holds."""
        if self._walk is not None or monotonic() < self._strays_checked_at + STRAYS_S:
            return False
        self._strays_checked_at = monotonic()
        return any(
            not policies.pauses(tag, queue) and tag not in policies.limited
            for tag, queue in self._table.count(Status.HELD)
        )

    def _forget_empty_policies(self) -> None:
        if monotonic() > self._forget_at:
            self._forget_at = monotonic() + FORGET_S
            self._table.forget()

    # -- the steps of a walk ----------------------------------------------------------------------

    def _steps(
        self, policies: Policies, unapplied: Sequence[Policy], releases: bool
    ) -> Iterator[None]:
        """Release and hold rows, first those due within the horizon, then all."""
        pauses = [policy for policy in unapplied if policy.is_paused]
        for until in (self._clock.certain_now() + self._horizon, None):
            if releases:
                yield from self._release_all(policies, until)
            if pauses:
                yield from self._hold_all(policies, pauses, until)

    def _hold_all(
        self, policies: Policies, pauses: Sequence[Policy], until: datetime | None
    ) -> Iterator[None]:
        queues = {policy.name for policy in pauses if policy.kind == "queue"}
        pauses_tags = any(policy.kind == "tag" for policy in pauses)
        for level in self._levels(Status.NOT_COMPLETE):
            yield
            if not pauses_tags and level.queue not in queues:
                continue
            for rows in self._rows_of(Status.NOT_COMPLETE, level, until):
                yield
                ids = [row.id for row in rows if policies.pauses(row.tag, level.queue)]
                for batch in batches(ids, PAUSE_ROWS):
                    self._hold(batch)
                    yield

    def _release_all(self, policies: Policies, until: datetime | None) -> Iterator[None]:
        for level in self._levels(Status.HELD):
            yield
            for rows in self._rows_of(Status.HELD, level, until):
                yield
                ids = [row.id for row in rows if not policies.pauses(row.tag, level.queue)]
                for batch in batches(ids, PAUSE_ROWS):
                    self._release(batch)
                    yield

    def _levels(self, status: Status) -> Iterator[Level]:
        """Yield the levels of all queues, with one query for every few queues."""
        levels, after = self._rows.levels(status, None)
        while True:
            yield from levels
            if after is None:
                return
            levels, after = self._rows.levels(status, after)

    def _rows_of(
        self, status: Status, level: Level, until: datetime | None
    ) -> Iterator[list[FoundRow]]:
        """Yield the rows of a level in batches, in the order of their due times."""
        since: datetime | None = None
        while rows := self._rows.look(status, level, since, until):
            yield rows
            since = rows[-1].due
            if since != rows[0].due:
                continue
            # The batch has one due time only: read all rows of that instant in the order of their
            # ids, then continue behind it.
            after_id = 0
            while rows := self._rows.due_at(status, level, since, after_id):
                yield rows
                after_id = rows[-1].id
            if since == LATEST_DUE:
                return
            since += timedelta(microseconds=1)

    def _hold(self, ids: Sequence[int]) -> int:
        """Hold the rows among `ids` that wait and are paused; return their number.

        The statement checks the policy again. A row whose pause has ended meanwhile is not counted.
        """
        held = self._rows.hold(ids)
        if held:
            self._events.emit("task.held", count=held)
        return held

    def _release(self, ids: Sequence[int]) -> None:
        released = self._rows.release(ids)
        if len(released) < len(ids):
            self._is_complete = False  # another transaction has locked a row: walk again
        if not released:
            return
        self._events.emit("task.released", count=len(released))
        now_us = self._clock.now_us()
        horizon_us = self._horizon.total_seconds() * 1e6 or 1e15
        near = [entry for entry in released if now_us < entry.due_us <= now_us + horizon_us]
        if near:  # the sweep drains the overdue ones
            self._timer.arm(near)
