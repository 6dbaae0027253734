"""The policies that a process goes by: read about once a second, and looked at as often as one likes.

A worker's main process reads them in a thread, and each chunk that goes to the pool brings their stamp: a pool process
reads them itself only when that is another one than of those that it has, or when the main process has not come to it
yet. All others (commands, eager tasks) read them when they look, if the last ones are older than a second. Without
policies the stamp is 0, and nobody reads anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import StoreError
from delaytasks.core.policies import NO_POLICIES, Policies, Policy

REFRESH_S = 1.0


class PolicyCache:
    """Of one database."""

    def __init__(self, read: Callable[[], Sequence[Policy]]) -> None:
        self._read = read
        self.known = NO_POLICIES
        self._read_at = float("-inf")
        self._is_read = False
        #: Somebody else says when to read.
        self.is_led = False

    @property
    def stamp(self) -> int | None:
        """None as long as nobody has read them here."""
        return self.known.stamp if self._is_read else None

    def current(self) -> Policies:
        """Never much older than a second."""
        if not self.is_led and monotonic() - self._read_at >= REFRESH_S:
            try:
                self.refresh()
            except StoreError:
                if not self._is_read:
                    raise
                self._read_at = monotonic()  # what is known is better than nothing
        return self.known

    def refresh(self) -> Policies:
        """As they are now."""
        read_at = monotonic()
        self.known = Policies(tuple(self._read()))
        self._read_at, self._is_read = read_at, True
        return self.known

    def follow(self, stamp: int | None) -> None:
        """The worker's main process has those of this stamp, or has read none yet."""
        self.is_led = True
        if stamp is None or stamp != self.known.stamp:
            self.refresh()
