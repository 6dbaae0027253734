"""Explain lost leases by faults.

A fault explains a lost lease if it hit the owner at the time when the lease had to be renewed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chaos.history import Fault, RowChange

#: Leases are renewed after each third of their duration. An owner that cannot reach the database
#: for a shorter time misses no renewal.
MISSED = 1 / 3
#: The rows of a worker are released 15 s after its last report, which may be 6 s old when it is cut
#: off.
SILENT_US = 9_000_000


class LostLease(NamedTuple):
    """A lease that was lost."""

    #: The worker and process as named in the claimed row; no fault matches an empty name.
    owner: str
    #: The time of the claim or of the last renewal.
    from_us: int
    #: The end of the lease, or the time when it was taken away earlier.
    until_us: int


def lost_lease(claim: RowChange, changes: Iterable[RowChange], end: RowChange) -> LostLease:
    leases = [
        change
        for change in changes
        if change.version == claim.version and change.lease_until_us is not None
    ]
    if not leases:
        return LostLease(claim.worker or "", claim.at_us, end.at_us)
    last = max(leases, key=lambda change: change.lease_until_us or 0)
    return LostLease(claim.worker or "", last.at_us, min(last.lease_until_us or 0, end.at_us))


class Explanations:
    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = [fault for fault in faults if fault.effect != "none"]

    def has_ended(self, lease: LostLease) -> bool:
        """Return whether the owner is dead or was silent, so that its lease may end early."""
        hit = list(self._hit(lease.owner))
        return time_away_us(hit, lease) >= SILENT_US or any(
            fault.effect in ("dead", "ending") and fault.from_us <= lease.until_us for fault in hit
        )

    def explain(self, lease: LostLease) -> bool:
        """Return whether the owner was dead, or was away when the lease had to be renewed."""
        hit = list(self._hit(lease.owner))
        if any(fault.effect == "dead" and fault.from_us <= lease.until_us for fault in hit):
            return True
        away_us = time_away_us(hit, lease)
        return away_us > 0 and away_us >= MISSED * (lease.until_us - lease.from_us)

    def _hit(self, owner: str) -> Iterable[Fault]:
        return (fault for fault in self._faults if any(part in owner for part in fault.key_owners))


def time_away_us(faults: Iterable[Fault], lease: LostLease) -> int:
    """Return how long faults kept the owner away during the lease.

    Overlapping faults count once.
    """
    total, known_us = 0, lease.from_us
    for fault in sorted((f for f in faults if f.effect == "away"), key=lambda f: f.from_us):
        until_us = min(fault.until_us, lease.until_us)
        total += max(until_us - max(fault.from_us, known_us), 0)
        known_us = max(known_us, until_us)
    return total
