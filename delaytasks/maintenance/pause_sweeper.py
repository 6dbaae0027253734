"""What pausing does to rows that wait: the sweep holds them, and releases them afterwards, in steps.

Each change of a policy begins a walk over the rows that wait (or are held), level by level; what is due comes first.
A walk takes a part of each sweep only, and goes on where it was; whoever dies in it leaves the policy unapplied, and
the next worker walks. What comes to wait behind a walk is met when it is near, or when it is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from delaytasks.core.clock import UTC, Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Level, Seen, Timer
from delaytasks.core.policies import Policies, Policy
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.execution.policy_cache import PolicyCache

if TYPE_CHECKING:
    from delaytasks.storage.paused_rows import PausedRows
    from delaytasks.storage.policies import PolicyTable

STEP = 500
#: No instant comes after it.
LATEST = datetime.max.replace(tzinfo=UTC)
#: The part of a sweep's interval that a walk may take.
SHARE = 0.4
#: How often it is made sure that nothing is held that nobody pauses: by a worker that was frozen in the middle.
STRAYS_S = 60.0

#: How often a worker deletes policies that have said nothing for long. Whoever knows of them then reads all policies.
FORGET_S = 3600.0
#: Policies that are marked as applied in one transaction.
APPLIED = 200

Beat = Callable[[], None]
T = TypeVar("T")


class PauseSweeper:
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
        self._cache = cache
        self._table = table
        self._rows = rows
        self._clock = clock
        self._timer = timer
        self._events = events
        self._horizon = timedelta(seconds=settings.horizon_s or 0)
        self._budget_s = settings.sweep_s * SHARE
        self._walk: Iterator[None] | None = None
        self._of: Sequence[Policy] = ()
        self._is_whole = True
        self._strays_at = float("-inf")
        self._forgets_at = monotonic() + FORGET_S

    def policies(self) -> Policies:
        """As they are now."""
        return self._cache.refresh()

    def hold_near(self, policies: Policies, since: datetime, until: datetime, beat: Beat) -> None:
        """Rows that came near while they are paused, as far as there is time: else claims hold them."""
        ends = monotonic() + self._budget_s
        while policies.has_pauses and monotonic() < ends:
            beat()
            ids = self._rows.near(since, until)
            if not ids or not self._hold(ids):
                return

    def walk(self, policies: Policies, beat: Beat) -> None:
        """Goes on holding and releasing what changed policies say."""
        todo = list(policies.unapplied.values())
        releases = any(not policy.is_paused for policy in todo) or self._has_strays(policies)
        if self._walk is None and not todo and not releases:
            return
        if self._walk is None or self._of != todo:
            self._walk, self._of, self._is_whole = self._steps(policies, todo, releases), todo, True
        ends = monotonic() + self._budget_s
        for _ in self._walk:
            beat()
            if monotonic() > ends:
                return
        self._walk = None
        if monotonic() > self._forgets_at:
            self._forgets_at = monotonic() + FORGET_S
            self._table.forget()
        if self._is_whole:
            for some in _lots(todo, APPLIED):
                self._table.applied(some)
                beat()

    def _has_strays(self, policies: Policies) -> bool:
        if self._walk is not None or monotonic() < self._strays_at + STRAYS_S:
            return False
        self._strays_at = monotonic()
        held = self._table.held()
        return any(
            not policies.pauses(tag, queue) and tag not in policies.limited for tag, queue in held
        )

    # -- steps ------------------------------------------------------------------------------------

    def _steps(self, policies: Policies, todo: Sequence[Policy], releases: bool) -> Iterator[None]:
        near = self._clock.certain_now() + self._horizon
        for until in (near, None):
            if releases:
                yield from self._release_all(policies, until)
            if pauses := [policy for policy in todo if policy.is_paused]:
                yield from self._hold_all(policies, pauses, until)

    def _hold_all(
        self, policies: Policies, pauses: Sequence[Policy], until: datetime | None
    ) -> Iterator[None]:
        queues = {policy.name for policy in pauses if policy.kind == "queue"}
        has_tags = any(policy.kind == "tag" for policy in pauses)
        for level in self._levels(Status.NOT_COMPLETE):
            yield
            if not has_tags and level.queue not in queues:
                continue
            for seen in self._look(Status.NOT_COMPLETE, level, until):
                yield
                for batch in _lots(
                    [row.id for row in seen if policies.pauses(row.tag, level.queue)]
                ):
                    self._hold(batch)
                    yield

    def _release_all(self, policies: Policies, until: datetime | None) -> Iterator[None]:
        for level in self._levels(Status.HELD):
            yield
            for seen in self._look(Status.HELD, level, until):
                yield
                for batch in _lots(
                    [row.id for row in seen if not policies.pauses(row.tag, level.queue)]
                ):
                    self._release(batch)
                    yield

    def _levels(self, status: Status) -> Iterator[Level]:
        """The levels of all queues, read for some queues at a time: a sweep has other work besides."""
        some, after = self._rows.levels(status, None)
        while True:
            yield from some
            if after is None:
                return
            some, after = self._rows.levels(status, after)

    def _look(self, status: Status, level: Level, until: datetime | None) -> Iterator[list[Seen]]:
        since: datetime | None = None
        while seen := self._rows.look(status, level, since, until):
            yield seen
            since = seen[-1].due
            if (
                since == seen[0].due
            ):  # all of one instant: they are counted by their ids, and come no more
                last = 0
                while crowd := self._rows.crowd(status, level, since, last):
                    yield crowd
                    last = crowd[-1].id
                if since == LATEST:
                    return
                since += timedelta(microseconds=1)

    def _hold(self, ids: Sequence[int]) -> int:
        held = self._rows.hold(ids)
        if held:
            self._events.emit("task.held", count=held)
        return held

    def _release(self, ids: Sequence[int]) -> None:
        released = self._rows.release(ids)
        if len(released) < len(ids):
            self._is_whole = False  # somebody has locked some of them: the next walk comes by again
        if not released:
            return
        self._events.emit("task.released", count=len(released))
        now = self._clock.now_us()
        horizon_us = self._horizon.total_seconds() * 1e6 or 1e15
        near = [entry for entry in released if now < entry.due_us <= now + horizon_us]
        if near:  # what is overdue, the sweep drains
            self._timer.arm(near)


def _lots(some: Sequence[T], size: int | None = None) -> Iterator[Sequence[T]]:
    size = size or STEP
    for start in range(0, len(some), size):
        yield some[start : start + size]
