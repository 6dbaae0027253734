"""Lines of limited tags: how many of those who wait may start now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Without a limit.
ANY = 1_000_000_000
#: One start in so many may come with others, all else keeps its distance: who is late for a moment can catch up.
BUNCH = 10
#: Distances are longer by this than the rate needs: a start may come a little after it was allowed.
ROOM_TO_MOVE = 1.03
#: So many processes may have free hands.
HANDS = 8
#: A line whose tag has no free place is looked at again after this time: a place that nobody hands on became free
#: when a worker stopped, or when a limit was raised.
LOOK_S = 1.0


class WaitlistState(NamedTuple):
    """The line of a limited tag in a queue, as somebody left it."""

    queue: str
    tag: str
    #: So many of those who wait may start now, as far as it is known; None if nobody has looked.
    open: int | None = 1
    #: Somebody should look again after this time.
    look_s: float = LOOK_S


class StartPace(NamedTuple):
    """A rate as a distance between starts, and how many may come without it. In no time of `period_s` are there more
    than `rate`: those of a bunch, and the others at their distances."""

    interval_s: float
    bunch: int

    @classmethod
    def of(cls, rate: int, period_s: float) -> StartPace:
        bunch = 1 + rate // BUNCH
        return cls(period_s * ROOM_TO_MOVE / (rate - bunch + 1), bunch)

    @property
    def most_ahead_s(self) -> float:
        """Further ahead only another pace can have been."""
        return self.bunch * self.interval_s

    def starts(self, ahead_s: float) -> int:
        """How many may start now; `ahead_s` is how long the next one's instant is ahead."""
        return max(int(self.bunch - ahead_s / self.interval_s + 1e-6), 0)

    def wait_s(self, ahead_s: float) -> float:
        """Until one may."""
        return max(ahead_s - (self.bunch - 1) * self.interval_s, 0.0)


@dataclass
class Room:
    """What the limits of a tag leave free."""

    places: int = ANY
    #: For each key; tasks without a key are not counted.
    per_key: int | None = None
    #: How many run, by their keys.
    running: Mapping[str, int] = field(default_factory=dict)
    look_s: float = LOOK_S
    pace: StartPace | None = None
    starts: int = ANY
    #: By what the next start's instant is ahead of now.
    ahead_s: float = 0.0

    @property
    def left(self) -> int:
        return min(self.places, self.starts)

    def share(self, wanted: int, at_once: int = 1) -> int:
        """How many one process takes together. Beyond those that it starts at once they run one after another, while
        others may have free hands."""
        return (
            min(wanted, self.starts, self.places, max(self.places // HANDS, at_once))
            if self.places > 0
            else 0
        )

    def for_key(self, key: str) -> int:
        if self.per_key is None or not key:
            return ANY
        return max(self.per_key - self.running.get(key, 0), 0)

    @property
    def full_keys(self) -> list[str]:
        return [key for key in self.running if self.for_key(key) <= 0]

    def keep_pace(self, pace: StartPace, ahead_s: float) -> None:
        self.pace, self.ahead_s = pace, max(ahead_s, 0.0)
        self.starts = pace.starts(self.ahead_s)
        if not self.starts:
            self.look_s = min(self.look_s, max(pace.wait_s(self.ahead_s), 0.001))
