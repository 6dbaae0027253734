"""The waitlists of limited tags that the processes of one worker serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from delaytasks.core.clock import monotonic
from delaytasks.core.waitlists import WAITLIST_RECHECK_S, WaitlistState

#: A slot that seemed taken may have been on its way from one task to the next. The first recheck
#: comes after this time, and each further one after twice the time.
FIRST_RECHECK_S = 0.02
#: While processes serve a waitlist, another free process probes it after this time. After each
#: probe that finds no free slot the time doubles, up to `WAITLIST_RECHECK_S`. The processes that
#: serve the waitlist may run tasks that take minutes, and they report nothing before these end.
PROBE_S = 0.1
#: How many waitlists a worker tracks, and how many full ones it checks per second. The drain
#: chunks of the sweep serve all other waitlists.
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
    """The state of the waitlist of one tag in one queue, as far as the worker knows it."""

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
        return any(one.wanted or one.serving for one in self._waitlists.values())

    @property
    def next_check_s(self) -> float:
        """In how many seconds the next check is due."""
        return min((one.check_at for one in self._waitlists.values()), default=inf) - monotonic()

    def update(
        self,
        states: Sequence[WaitlistState],
        visited: WaitlistName | None = None,
        is_probe: bool = False,
    ) -> float | None:
        """Record the states that a process reports.

        `visited` is the waitlist that the process was sent to. `is_probe` is true if the process
        only probed it and ran no long task. Return the number of seconds until a further check is
        needed, or None if an earlier one is due anyway.
        """
        if visited is not None and (known := self._waitlists.get(visited)) is not None:
            known.serving, known.unreported, known.checks = max(known.serving - 1, 0), 0, 0
            if not states:
                known.wanted, known.check_at = 0, inf
        first_s = inf
        slowdown = max(len(self._waitlists) / MAX_CHECKS_PER_S, 1.0)
        for state in states:
            name, was_visited = state[:2], visited == state[:2]
            known = self._waitlists.get(name)
            if known is None and len(self._waitlists) >= MAX_TRACKED_WAITLISTS:
                continue
            if is_probe and was_visited and known is not None and known.serving:
                first_s = min(first_s, self._update_after_probe(known, state.open or 0))
                continue
            if state.open is None:
                if known is not None:
                    continue  # a process serves it, or checks it within a second
                state = state._replace(open=1)
            known = self._waitlists.setdefault(name, TrackedWaitlist())
            check_s = self._update_after_visit(known, state, was_visited) * slowdown
            check_at = monotonic() + check_s
            if check_at < known.check_at:
                known.check_at = check_at
                first_s = min(first_s, check_s)
        self._waitlists = {
            name: one
            for name, one in self._waitlists.items()
            if one.wanted or one.serving or one.check_at < inf
        }
        return None if first_s == inf else first_s

    @staticmethod
    def _update_after_visit(
        known: TrackedWaitlist, state: WaitlistState, was_visited: bool
    ) -> float:
        """Return in how many seconds the waitlist should be checked again."""
        if state.open:
            known.misses = 0
            # A process that comes back frees one more slot.
            known.wanted = max(known.wanted + (1 if was_visited else 0), state.open)
            return state.recheck_s
        known.wanted = 0
        if not was_visited:
            return state.recheck_s
        recheck_s = FIRST_RECHECK_S * 2.0 ** min(known.misses, 10)
        known.misses += 1
        known.check_at = inf
        return min(state.recheck_s, recheck_s)

    @staticmethod
    def _update_after_probe(known: TrackedWaitlist, free: int) -> float:
        """Record a probe of a waitlist that others serve: `free` includes the slot it took."""
        known.wanted = max(known.wanted, free - 1)
        known.probe_s = PROBE_S if free else min(2 * known.probe_s, WAITLIST_RECHECK_S)
        known.check_at = monotonic() + known.probe_s
        return known.probe_s

    def visit_failed(self, name: WaitlistName) -> float | None:
        return self.update([WaitlistState(*name, 0, WAITLIST_RECHECK_S)], name)

    def next_visit(self) -> WaitlistVisit | None:
        """Return the waitlist that a free process should serve or probe."""
        now = monotonic()
        for name, one in self._waitlists.items():
            if one.check_at <= now:
                # Each process that has not come back found a task that takes long. There may be
                # as many free slots again.
                one.checks = one.unreported + 1
            if not one.wanted and not one.checks:
                continue
            is_probe = not one.wanted and one.serving > 0
            if one.wanted:
                one.wanted -= 1
            else:
                one.checks -= 1
            one.serving += 1
            one.unreported += 1
            one.check_at = now + one.probe_s
            self._waitlists[name] = self._waitlists.pop(name)  # to the end: they take turns
            return WaitlistVisit(name, is_probe)
        return None
