"""What the processes of a worker report about the waitlists of limited tags."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

#: A worker looks again after this time at a waitlist whose tag has no free slot: a worker that
#: stopped, or a raised limit, frees slots without a message.
WAITLIST_RECHECK_S = 1.0


class WaitlistsSeen(NamedTuple):
    """The waitlists of the limited tags that a claim found, and the number of rows that it held."""

    #: Each waitlist is a queue and a tag.
    waitlists: Set[tuple[str, str]] = frozenset()
    held: int = 0

    def merge(self, other: WaitlistsSeen) -> WaitlistsSeen:
        return WaitlistsSeen(self.waitlists | other.waitlists, self.held + other.held)


NO_WAITLISTS = WaitlistsSeen()


class WaitlistState(NamedTuple):
    """The waitlist of a limited tag in a queue, as a process left it."""

    queue: str
    tag: str
    #: The number of tasks that may start now, as far as known; None if no process has looked.
    open: int | None = 1
    #: The time after which a process should look again.
    recheck_s: float = WAITLIST_RECHECK_S
