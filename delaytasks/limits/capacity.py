"""The capacity of a limited tag: how many of its waiting tasks may start now.

Running rows are counted at each measurement, so the slot of a dead worker is free as soon as its
row is recovered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from delaytasks.core.policies import WAITLIST_RECHECK_S
from delaytasks.limits.queries import PolicyQueries

#: The number of slots, or of starts, of a tag without that limit.
UNLIMITED = 1_000_000_000
#: One start in `BURST_SHARE` may follow another without a distance, for late workers.
BURST_SHARE = 10
#: Distances are longer by this factor than the rate requires, since a start may come a little later
#: than it was allowed.
DISTANCE_FACTOR = 1.03
#: The number of processes that a process leaves slots for.
SHARING_PROCESSES = 8


class StartPace(NamedTuple):
    """A rate limit as a distance between starts, and the number of starts that need no distance.

    A window of `period_s` has at most `rate` starts: those of one burst, and the others at their
    distances.
    """

    interval_s: float
    burst: int

    @classmethod
    def of(cls, rate: int, period_s: float) -> StartPace:
        burst = 1 + rate // BURST_SHARE
        return cls(period_s * DISTANCE_FACTOR / (rate - burst + 1), burst)

    @property
    def max_ahead_s(self) -> float:
        """The largest value of `ahead_s` at this pace; a larger one comes from an earlier rate."""
        return self.burst * self.interval_s

    def starts(self, ahead_s: float) -> int:
        """Return how many tasks may start now, if the next start is due in `ahead_s`."""
        return max(int(self.burst - ahead_s / self.interval_s + 1e-6), 0)

    def wait_s(self, ahead_s: float) -> float:
        """Return the time until one task may start."""
        return max(ahead_s - (self.burst - 1) * self.interval_s, 0.0)


@dataclass
class Capacity:
    """What the limits of a tag leave free."""

    #: Free slots of the concurrency limit.
    slots: int = UNLIMITED
    #: The concurrency limit of each key; tasks without a key are not counted.
    key_limit: int | None = None
    #: The number of running tasks of each key.
    running: Mapping[str, int] = field(default_factory=dict)
    recheck_s: float = WAITLIST_RECHECK_S
    pace: StartPace | None = None
    #: Starts that the rate limit allows now.
    starts: int = UNLIMITED
    #: The time until the next start is due.
    ahead_s: float = 0.0

    @property
    def free(self) -> int:
        return min(self.slots, self.starts)

    def share(self, wanted: int, parallel: int = 1) -> int:
        """Return how many tasks one process may take.

        Beyond the `parallel` tasks that the process starts simultaneously, its tasks run one after
        another, so it leaves the other slots to processes that may be idle.
        """
        if self.slots <= 0:
            return 0
        return min(wanted, self.starts, self.slots, max(self.slots // SHARING_PROCESSES, parallel))

    def for_key(self, key: str) -> int:
        if self.key_limit is None or not key:
            return UNLIMITED
        return max(self.key_limit - self.running.get(key, 0), 0)

    @property
    def full_keys(self) -> list[str]:
        return [key for key in self.running if self.for_key(key) <= 0]

    def limit_rate(self, pace: StartPace, ahead_s: float) -> None:
        self.pace, self.ahead_s = pace, max(ahead_s, 0.0)
        self.starts = pace.starts(self.ahead_s)
        if not self.starts:
            self.recheck_s = min(self.recheck_s, max(pace.wait_s(self.ahead_s), 0.001))


class CapacityMeter:
    """Measures the capacity of a tag whose policy is locked."""

    def __init__(self, policies: PolicyQueries) -> None:
        self._policies = policies

    def measure(self, on: Any, policy: Any) -> Capacity:
        if policy is None:
            return Capacity()
        concurrency, key_limit = policy.concurrency, policy.key_concurrency
        capacity = Capacity(key_limit=key_limit)
        if concurrency is not None or key_limit is not None:
            capacity.running = self._policies.running(on, policy.name, key_limit is not None)
        if concurrency is not None:
            capacity.slots = max(concurrency - sum(capacity.running.values()), 0)
        if policy.rate is not None:
            capacity.limit_rate(*self._pace(on, policy))
        if policy.is_paused:
            capacity.slots = 0
        return capacity

    def record_starts(
        self, on: Any, policy: Any, capacity: Capacity, count: int, turn: str | None
    ) -> None:
        """Write the time of the next start and the last key of the fair order into the policy."""
        if policy is None:
            return
        values: dict[str, Any] = {}
        if capacity.pace is not None and count:
            values["next_start"] = capacity.ahead_s + count * capacity.pace.interval_s
        if turn != policy.turn:
            values["turn"] = turn
        if values:
            self._policies.change(on, policy.name, values)

    def _pace(self, on: Any, policy: Any) -> tuple[StartPace, float]:
        pace, ahead_s = StartPace.of(policy.rate, policy.rate_period_s), 0.0
        if policy.next_start is not None:
            ahead_s = (policy.next_start - self._policies.now(on)).total_seconds()
        if ahead_s > pace.max_ahead_s:
            ahead_s = pace.max_ahead_s
            self._policies.change(on, policy.name, {"next_start": ahead_s})
        return pace, ahead_s
