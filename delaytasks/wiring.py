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
    from delaytasks.forecast.operations import ForecastOperations
    from delaytasks.maintenance.sweeper import Sweeper
    from delaytasks.operations.bulk import BulkOperations
    from delaytasks.operations.callbacks import Callbacks
    from delaytasks.operations.celery_tasks import CeleryTasks
    from delaytasks.operations.lookup import Lookup
    from delaytasks.operations.policies import PolicyOperations
    from delaytasks.operations.revocations import Revocations
    from delaytasks.operations.single_tasks import SingleTasks
    from delaytasks.operations.transactions import CallerTransactions
    from delaytasks.operations.waiting import Waiting
    from delaytasks.operations.why import Explanations
    from delaytasks.processors.registry import Registry
    from delaytasks.recurrence.operations import RecurringOperations
    from delaytasks.routing.shard import Shard
    from delaytasks.scheduling.producer import Producer
    from delaytasks.scheduling.queue_routing import QueueRouting
    from delaytasks.sharding.router import Router
    from delaytasks.start_checks import StartChecks
    from delaytasks.storage.store import Store
    from delaytasks.timers.background import BackgroundTimer
    from delaytasks.timers.direct import DirectTimer
    from delaytasks.timers.publisher import Publisher
    from delaytasks.timers.redis import RedisTimer
    from delaytasks.twins import AsyncCalls

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
    #: Arms rows in the calling thread.
    timer: Timer
    #: The same, or a queue in front of it: with `arm="background"`, producers do not wait.
    producer_timer: Timer
    #: This queue, or None.
    background_timer: BackgroundTimer | None
    #: The timer if it is of this kind, or None.
    direct_timer: DirectTimer | None
    redis_timer: RedisTimer | None
    callbacks: Callbacks
    celery_tasks: CeleryTasks
    revocations: Revocations
    transactions: CallerTransactions
    lookup: Lookup
    single: SingleTasks
    bulk: BulkOperations
    waiting: Waiting
    #: Explains why tasks have not run. Imports the modules of it with the first call.
    explanations: Callable[[], Explanations]
    policies: PolicyOperations
    #: Imports the package of recurring schedules with the first call.
    recurring: Callable[[], RecurringOperations]
    #: Imports the package of forecasts with the first call.
    forecasts: Callable[[], ForecastOperations]
    checks: StartChecks
    async_calls: AsyncCalls
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

    def flush(self) -> bool:
        """Arm the entries that wait for the background timer. Return False if that takes too
        long.
        """
        return self.background_timer is None or self.background_timer.flush()

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
