"""One database of a deployment with the objects that work on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from delaytasks.core.clock import Clock
from delaytasks.core.interfaces import CallerConnection
from delaytasks.core.masking import mask_url
from delaytasks.core.task import DelayTask
from delaytasks.execution.policy_cache import PolicyCache
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.scheduling.producer import Producer
from delaytasks.storage.store import Store

#: The time that a call of all shards waits for each answer.
EACH_SHARD_S = 10.0


class RerunTask(Protocol):
    """Run a FAILED or CANCELLED task again, as `Tasks.rerun` does."""

    def __call__(
        self,
        id: int,
        due: datetime,
        version: int | None = None,
        on: CallerConnection | None = None,
    ) -> DelayTask: ...


@dataclass(frozen=True, repr=False)
class ShardAddress:
    """Which database of a deployment a shard is. Most deployments have one shard, number 0.

    Attributes
    ----------
    number
        The position of the database in `delaytasks_database_url`.
    url
        The SQLAlchemy URL of the database, with its password.
    """

    number: int
    url: str

    def __repr__(self) -> str:
        return f"<ShardAddress {self.number}: {mask_url(self.url)}>"


@dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """One database of a deployment, with the objects that work on it."""

    number: int
    url: str
    new_id: Callable[[], int]
    clock: Clock
    sweeper: Sweeper
    producer: Producer
    policies: PolicyCache
    rerun: RerunTask
    _store: Store
    #: Raises an error if the database is another shard than its position says.
    _check_number: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"<Shard {self.number}: {mask_url(self.url)}>"

    @property
    def address(self) -> ShardAddress:
        return ShardAddress(self.number, self.url)

    @property
    def store(self) -> Store:
        self._check_number()
        return self._store

    def close(self) -> None:
        self._store.close()

    def named(self, name: str) -> str:
        """Return `name` with the number of the shard, unless the number is 0."""
        return f"{name} {self.number}" if self.number else name
