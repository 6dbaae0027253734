"""The last renewal of a worker's leases, which the processes of its pool read."""

from __future__ import annotations

from math import inf
from typing import NamedTuple


class LastRenewal(NamedTuple):
    """The last renewal of leases that succeeded. Both times are those of the monotonic clock.

    The docstring of `delaytasks.worker.shared_memory.Renewals` has a drawing of them.
    """

    #: When the renewal was requested. The renewed leases last from this time on.
    asked_at: float
    #: The lease of a row that was claimed before this time had ended before the renewal was
    #: answered.
    lost_if_claimed_before: float


#: No lease has been renewed yet.
NO_RENEWAL = LastRenewal(-inf, -inf)
