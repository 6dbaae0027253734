"""The databases of a deployment, each with what works on it. Mostly there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from delaytasks.core.clock import Clock
from delaytasks.core.masking import mask_url
from delaytasks.execution.policy_cache import PolicyCache
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.scheduling.producer import Producer
from delaytasks.sharding.databases import Shards
from delaytasks.storage.store import Store


@dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """One database, and what works on it."""

    number: int
    #: With its password: for who opens a session there.
    url: str
    new_id: Callable[[], int]
    clock: Clock
    sweeper: Sweeper
    producer: Producer
    policies: PolicyCache
    _databases: Shards

    def __repr__(self) -> str:
        return f"<Shard {self.number}: {mask_url(self.url)}>"

    @property
    def store(self) -> Store:
        return self._databases.store(self.number)

    def close(self) -> None:
        self._databases.stores[self.number].close()

    def named(self, what: str) -> str:
        """Told apart from what other shards have."""
        return f"{what} {self.number}" if self.number else what
