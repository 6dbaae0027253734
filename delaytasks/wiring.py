"""The objects behind one `DelayTasks`, for packages of this project that need more than its API.

`delaytasks/composition.py` makes them. This module imports none of them, so that every package can
import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from delaytasks.core.task import DelayTask

if TYPE_CHECKING:
    from delaytasks.core.clock import Clock
    from delaytasks.core.events import Events
    from delaytasks.core.interfaces import Timer, Transaction
    from delaytasks.core.settings import Settings
    from delaytasks.maintenance.sweeper import Sweeper
    from delaytasks.operations.bulk import BulkOperations
    from delaytasks.operations.callbacks import Callbacks
    from delaytasks.operations.lookup import Lookup
    from delaytasks.operations.policies import PolicyOperations
    from delaytasks.operations.single_tasks import SingleTasks
    from delaytasks.operations.transactions import CallerTransactions
    from delaytasks.processors.registry import Registry
    from delaytasks.routing.shard import Shard
    from delaytasks.scheduling.producer import Producer
    from delaytasks.scheduling.queue_routing import QueueRouting
    from delaytasks.sharding.router import Router
    from delaytasks.start_checks import StartChecks
    from delaytasks.storage.store import Store
    from delaytasks.timers.direct import DirectTimer
    from delaytasks.timers.publisher import Publisher
    from delaytasks.timers.redis import RedisTimer

#: Is entered around each call of a processor.
ProcessorContext = Callable[[DelayTask], AbstractContextManager[Any]]


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, eq=False, repr=False)
class Wiring:
    """Everything that one set of settings makes, and the registry and events that outlive it."""

    celery: Any
    registry: Registry
    events: Events
    #: Web frameworks enter these around each call of a processor, the first one outermost.
    processor_contexts: Sequence[ProcessorContext]
    settings: Settings
    router: Router
    queues: QueueRouting
    publisher: Publisher
    #: Arms rows in the calling thread; `timer` may be a queue in front of it.
    inline_timer: Timer
    timer: Timer
    direct_timer: DirectTimer | None
    redis_timer: RedisTimer | None
    callbacks: Callbacks
    transactions: CallerTransactions
    lookup: Lookup
    single: SingleTasks
    bulk: BulkOperations
    policies: PolicyOperations
    checks: StartChecks
    closables: Sequence[Closable]

    @property
    def shards(self) -> Sequence[Shard]:
        return self.router.shards

    # The first database answers all calls that name no shard.

    @property
    def store(self) -> Store:
        return self.shards[0].store

    @property
    def clock(self) -> Clock:
        return self.shards[0].clock

    @property
    def sweeper(self) -> Sweeper:
        return self.shards[0].sweeper

    @property
    def producer(self) -> Producer:
        return self.shards[0].producer

    def transaction_for(self, session: Any, task: DelayTask) -> Transaction | None:
        """Return the caller's transaction, which must be on the shard of `task`."""
        transaction = self.transactions.of(session)
        self.router.check_shard(task, transaction)
        return transaction

    def close(self) -> None:
        """Send the entries that wait to be armed, and close connections."""
        for closable in self.closables:
            closable.close()


class Wired(Protocol):
    """A `DelayTasks`, as the packages below it see it."""

    @property
    def _wiring(self) -> Wiring: ...

    def _rewire(self, **settings: Any) -> None: ...


def wiring_of(delays: Wired) -> Wiring:
    """Return the objects behind `delays`; the first call makes them."""
    return delays._wiring


def rewire(delays: Wired, **settings: Any) -> None:
    """Close the objects behind `delays`; the next call makes them anew with these settings too."""
    delays._rewire(**settings)


def use_direct_timer(delays: Wired) -> None:
    """From now on this process contacts neither broker nor Redis and finds near rows in the table.

    To be called before anything is scheduled or run.
    """
    if wiring_of(delays).settings.uses_broker:
        rewire(delays, timer="direct")
