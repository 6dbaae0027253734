"""The waitlists of limited tags that the processes of one worker serve."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from delaytasks.model.clock import monotonic
from delaytasks.model.policies import WAITLIST_RECHECK_S, WaitlistState

#: A slot that seemed taken may have been on its way from one task to the next. The first recheck
#: comes after this time, and each further one after twice the time.
FIRST_RECHECK_S = 0.02
#: While processes serve a waitlist, another free process probes it after this time. After each
#: probe that finds no free slot the time doubles, up to `WAITLIST_RECHECK_S`, until the limits
#: change; if a rate allows the next start earlier, the probe comes then. The processes that serve
#: the waitlist may run tasks that take minutes, and they report nothing before these end.
PROBE_S = 0.1
#: How many waitlists a worker tracks, and how many full ones it checks per second. The drains
#: of overdue rows serve all other waitlists.
MAX_TRACKED_WAITLISTS, MAX_CHECKS_PER_S = 1000, 200
#: The queue and the tag of a waitlist.
WaitlistName = tuple[str, str]


class WaitlistVisit(NamedTuple):
    """The next work of a free process."""

    waitlist: WaitlistName
    #: Other processes serve the waitlist. This one starts what may start now and does not wait.
    is_probe: bool


@dataclass
class TrackedWaitlist:
    """The waitlist of one tag in one queue, as far as the worker knows it.

    What the processes report, in calls of `TrackedWaitlists.update`, decides what is next:

        from      event                                                    to
        unknown   a process reports it, with free slots or unchecked       OPEN
        unknown   a process reports it, without a free slot                FULL
        OPEN      `next_visit` has sent as many processes as are wanted    SERVED
        OPEN      a process reports no free slot                           SERVED or FULL
        SERVED    a process reports free slots                             OPEN
        SERVED    the last process comes back and found no free slot       FULL
        FULL      a check is due, and `next_visit` sends a process         SERVED
        FULL      a process reports free slots                             OPEN
        any       the last process comes back and found no waiting task    unknown

    OPEN: a free process would find a task that may start, and is sent immediately. SERVED:
    processes run tasks of the waitlist, and another one probes it when a check is due. FULL: no
    slot was free, and a process looks again when a check is due.
    """

    #: How many more processes would find a task that may start.
    wanted: int = 0
    #: How many processes serve it.
    serving: int = 0
    check_at: float = inf
    #: How many checks in a row found no free slot.
    misses: int = 0
    #: How many checks are due, and how many processes were sent since the last report.
    checks: int = 0
    unreported: int = 0
    probe_s: float = PROBE_S

    @property
    def is_active(self) -> bool:
        """Whether it is OPEN or SERVED."""
        return bool(self.wanted or self.serving)

    def visit_ended(self, is_empty: bool) -> None:
        """Record that a process came back, which found no waiting task if `is_empty`."""
        self.serving, self.unreported, self.checks = max(self.serving - 1, 0), 0, 0
        if is_empty:
            self.wanted, self.check_at = 0, inf

    def found(self, state: WaitlistState, was_visited: bool) -> float:
        """Record what a process found; return in how many seconds to check the waitlist again.

        `was_visited` is true if the process was sent to this waitlist. Otherwise a claim met it.
        """
        if state.open:
            self.misses = 0
            # A process that comes back frees one more slot.
            self.wanted = max(self.wanted + (1 if was_visited else 0), state.open)
            return state.recheck_s
        self.wanted = 0
        if not was_visited:
            return state.recheck_s
        recheck_s = FIRST_RECHECK_S * 2.0 ** min(self.misses, 10)
        self.misses += 1
        self.check_at = inf
        return min(state.recheck_s, recheck_s)

    def probed(self, state: WaitlistState) -> None:
        """Record a probe while others serve the waitlist; its slots include the one it took."""
        free = state.open or 0
        self.wanted = max(self.wanted, free - 1)
        self.probe_s = PROBE_S if free else max(min(2 * self.probe_s, state.recheck_s), PROBE_S)
        self.check_at = monotonic() + self.probe_s

    def limits_changed(self, now: float) -> None:
        """Let a check be due now, and further ones soon, since slots may have become free."""
        self.misses, self.probe_s, self.check_at = 0, PROBE_S, now

    def needs_process(self, now: float) -> bool:
        if self.check_at <= now:
            # Each process that has not come back found a task that takes long. There may be as many
            # free slots again.
            self.checks = self.unreported + 1
        return bool(self.wanted or self.checks)

    def send(self, now: float) -> bool:
        """Record that a free process is sent, and return whether it only probes."""
        is_probe = self.serving > 0 and not self.wanted
        if self.wanted:
            self.wanted -= 1
        else:
            self.checks -= 1
        self.serving += 1
        self.unreported += 1
        self.check_at = now + self.probe_s
        return is_probe


class TrackedWaitlists:
    """Not thread-safe: the lock of the dispatcher guards it."""

    def __init__(self) -> None:
        self._waitlists: dict[WaitlistName, TrackedWaitlist] = {}

    def __bool__(self) -> bool:
        return bool(self._waitlists)

    @property
    def queues(self) -> set[str]:
        return {queue for queue, _ in self._waitlists}

    @property
    def is_active(self) -> bool:
        """Whether a process serves one of them, or could start a task of one of them now."""
        return any(one.is_active for one in self._waitlists.values())

    @property
    def needs_process(self) -> bool:
        """Whether a process should be sent to one of them now."""
        now = monotonic()
        return any(one.needs_process(now) for one in self._waitlists.values())

    def next_check_at(self, now: float) -> float:
        """Return when the next check after `now` is due, or infinity."""
        times = (one.check_at for one in self._waitlists.values())
        return min((at for at in times if at > now), default=inf)

    def update(
        self,
        states: Sequence[WaitlistState],
        visited: WaitlistName | None = None,
        is_probe: bool = False,
    ) -> None:
        """Record the states that a process reports.

        `visited` is the waitlist that the process was sent to. `is_probe` is true if the process
        only probed it and ran no long task.
        """
        if visited is not None and (known := self._waitlists.get(visited)) is not None:
            known.visit_ended(is_empty=not states)
        slowdown = max(len(self._waitlists) / MAX_CHECKS_PER_S, 1.0)
        for state in states:
            name, was_visited = state[:2], visited == state[:2]
            known = self._waitlists.get(name)
            if known is None and len(self._waitlists) >= MAX_TRACKED_WAITLISTS:
                continue
            if is_probe and was_visited and known is not None and known.serving:
                known.probed(state)
                continue
            if state.open is None:
                if known is not None:
                    continue  # a process serves it, or checks it within a second
                state = state._replace(open=1)
            known = self._waitlists.setdefault(name, TrackedWaitlist())
            check_at = monotonic() + known.found(state, was_visited) * slowdown
            known.check_at = min(known.check_at, check_at)
        self._waitlists = {
            name: one
            for name, one in self._waitlists.items()
            if one.is_active or one.check_at < inf
        }

    def limits_changed(self, tags: Set[str]) -> None:
        """Check the waitlists of these tags now."""
        now = monotonic()
        for (_, tag), one in self._waitlists.items():
            if tag in tags:
                one.limits_changed(now)

    def visit_failed(self, name: WaitlistName) -> None:
        self.update([WaitlistState(*name, 0, WAITLIST_RECHECK_S)], name)

    def next_visit(self) -> WaitlistVisit | None:
        """Return the waitlist that a free process should serve or probe."""
        now = monotonic()
        for name, one in self._waitlists.items():
            if one.needs_process(now):
                self._waitlists[name] = self._waitlists.pop(name)  # to the end: they take turns
                return WaitlistVisit(name, one.send(now))
        return None
