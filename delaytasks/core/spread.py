"""Due times that are distributed over a period, so that many tasks do not become due together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import blake2b

_SCALE = 2.0**64


def share_of(name: str) -> float:
    """Return a number from 0 up to 1 that only depends on `name`, and is uniform over all names."""
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / _SCALE


@dataclass(frozen=True, slots=True)
class Spread:
    """The new due times of a bulk operation: each is up to `over` later than before."""

    over: timedelta

    def of(self, id: int, due: datetime) -> datetime:
        """Return the new due time of a task. For one task, it is the same in each call."""
        return due + share_of(str(id)) * self.over
