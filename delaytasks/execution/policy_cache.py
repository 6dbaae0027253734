"""The policies that a process goes by: read about once a second, and looked at as often as one likes.

A read costs one row while nothing changes, and then what has changed, however many policies there are. A worker's main
process reads in a thread, and each chunk that goes to the pool brings the stamp of what it knows: a pool process reads
only when it knows something else, or when the main process has not come to it yet. All others (commands, eager tasks)
read when they look, if the last read is older than a second. Without policies nobody in a pool reads anything.
"""

from __future__ import annotations

from collections.abc import Callable

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import StoreError
from delaytasks.core.policies import NO_POLICIES, Changes, Policies, Stamp

REFRESH_S = 1.0
#: So often the whole table is compared with what is known: processes of a release before number 0010 of the tables,
#: and people who write SQL, change policies without counting the change.
CHECK_S = 10.0


class PolicyCache:
    """Of one database."""

    def __init__(self, read: Callable[[int | None, bool], Changes]) -> None:
        """`read(number, checks)` returns what changed after that number, or all policies if the number is None."""
        self._read = read
        self.known = NO_POLICIES
        self._read_at = self._checked_at = float("-inf")
        self._is_read = False
        #: Somebody else says when to read.
        self.is_led = False

    @property
    def stamp(self) -> Stamp | None:
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

    def refresh(self, checks: bool = False) -> Policies:
        """As they are now."""
        read_at, known = monotonic(), self.known
        checks = checks or read_at - self._checked_at >= CHECK_S
        found = self._read(known.number if self._is_read else None, checks)
        if not found.is_whole and (found.policies or found.number != known.number):
            known = known.changed(found.policies, found.number)
        if not found.is_whole and found.stamp is not None and found.stamp != known.stamp:
            found = self._read(None, False)
        if found.is_whole:
            known = Policies(found.policies, found.number)
        if checks:
            self._checked_at = read_at
        if found.is_whole or known.number >= self.known.number:  # else another thread has read more
            self.known = known
        self._read_at, self._is_read = read_at, True
        return self.known

    def follow(self, stamp: Stamp | None) -> None:
        """The worker's main process has those of this stamp, or has read none yet."""
        self.is_led = True
        if stamp is None or stamp != self.known.stamp:
            self.refresh(checks=True)
