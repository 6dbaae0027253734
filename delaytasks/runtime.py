"""The objects behind one `DelayTasks`, each of them listed once.

A part is made by its first use and kept. The packages below this module receive the `Runtime`, or a
few of its parts, and never import this module when they are loaded. A test replaces a part by
setting the attribute before the part is used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from delaytasks.broker.arming import EtaTimer
from delaytasks.broker.publisher import Publisher
from delaytasks.db.migrations import url_of
from delaytasks.db.producer import Producer, QueueRouting
from delaytasks.db.store import Store
from delaytasks.events import Events
from delaytasks.loops import ThreadPool
from delaytasks.maintenance.sweeper import OnStep, PauseSweeper, Sweeper
from delaytasks.model.body import Cipher
from delaytasks.model.celery_calls import CALLBACK
from delaytasks.model.clock import Clock, reset_in_child, wall_ms
from delaytasks.model.ids import IdMaker
from delaytasks.model.private_files import tighten_data_folder
from delaytasks.model.task import DelayedTask
from delaytasks.operate.callbacks import Callbacks
from delaytasks.operate.durable_calls import CeleryTasks, Revocations
from delaytasks.operate.single_tasks import CallerTransactions
from delaytasks.registry import Registry
from delaytasks.run.policy_cache import PolicyCache
from delaytasks.settings import load_settings
from delaytasks.start_checks import StartChecks
from delaytasks.twins import AsyncCalls, InFramework

if TYPE_CHECKING:
    from datetime import datetime

    from delaytasks.broker.arming import BackgroundTimer
    from delaytasks.broker.direct import DirectTimer
    from delaytasks.broker.redis_timer import RedisTimer
    from delaytasks.model.task import Timer, Transaction
    from delaytasks.operate.explanations import Explanations
    from delaytasks.recurring.creation import Creation, RecurringTable

T = TypeVar("T")
#: Is entered around each call of a processor.
ProcessorContext = Callable[[DelayedTask], AbstractContextManager[Any]]


class PublishesMessages(Protocol):
    """A `MessagePublisher`, or that of the testing kit."""

    def publish(self, messages: Sequence[Any]) -> list[Exception | None]: ...
    def close(self) -> None: ...


class part(cached_property[T]):
    """A `cached_property` that two threads cannot make twice."""

    if not TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            with instance._lock:
                return super().__get__(instance, owner)


class Runtime:
    """Everything that one set of settings makes, and the registry and events that outlive it.

    Parameters
    ----------
    celery_app
        The Celery app, which is configured.
    arguments
        The settings given to `DelayTasks`.
    registry, events
        The processors and the events of the instance.
    ask_now
        Reads the time of the database, for the clock; by default from the store.
    ambient_transaction
        Returns the transaction of a call without `session=`.
    processor_contexts
        Web frameworks enter these around each call of a processor, the first one outermost.
    in_framework
        Runs the calls of coroutines as a web framework requires.
    tables_remedy
        How to make the tables, for messages.
    """

    def __init__(
        self,
        celery_app: Any,
        arguments: Mapping[str, Any],
        registry: Registry,
        events: Events,
        ask_now: Callable[[bool], datetime],
        ambient_transaction: Callable[[], Transaction | None],
        processor_contexts: Sequence[ProcessorContext],
        in_framework: InFramework,
        tables_remedy: str,
    ) -> None:
        self._lock = threading.RLock()
        reset_in_child(self)
        self.celery = celery_app
        self.registry = registry
        self.events = events
        self.ask_now = ask_now
        self.processor_contexts = processor_contexts
        self.in_framework = in_framework
        self.tables_remedy = tables_remedy
        self._ambient_transaction = ambient_transaction
        self.settings = settings = load_settings(celery_app.conf, os.environ, **arguments)
        if settings.has_structured_log:
            from delaytasks.logging import log_structured

            events.use_log(log_structured)
        if not settings.database_url:
            tighten_data_folder(Path(settings.data_dir))
        registry.set_in_flight(CALLBACK, settings.callback_in_flight)
        self.cipher = Cipher(settings.encryption_keys) if settings.encryption_keys else None

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def check(self) -> None:
        """Make the parts that raise the errors of wrong settings."""
        _ = self.producer, self.callbacks

    # -- the database -----------------------------------------------------------------------------

    @part
    def store(self) -> Store:
        settings = self.settings
        return Store(url_of(settings), settings, self.cipher, tables_remedy=self.tables_remedy)

    @part
    def clock(self) -> Clock:
        return Clock(self.ask_now)

    @part
    def new_id(self) -> IdMaker:
        return IdMaker(wall_ms, self.settings.shard)

    @part
    def policy_cache(self) -> PolicyCache:
        return PolicyCache(self.store.policies.changes)

    @part
    def transactions(self) -> CallerTransactions:
        return CallerTransactions(self._ambient_transaction, self.store.database.remedy_at)

    # -- timers -----------------------------------------------------------------------------------

    @part
    def publisher(self) -> Publisher:
        settings = self.settings
        return Publisher(self.celery, settings.namespace, settings.publish_limit_s, self.events)

    @part
    def eta_timer(self) -> EtaTimer:
        return EtaTimer(self.publisher, self.clock)

    @part
    def direct_timer(self) -> DirectTimer | None:
        """The timer if no broker is used."""
        if self.settings.uses_broker:
            return None
        from delaytasks.broker.direct import DirectTimer

        return DirectTimer(self.store.notices, self.clock)

    @part
    def redis_timer(self) -> RedisTimer | None:
        """The timer if it is of this kind."""
        if self.settings.timer_kind != "redis":
            return None
        from delaytasks.broker.redis_timer import RedisTimer, redis_location

        settings, conf = self.settings, self.celery.conf
        location = redis_location(
            settings.redis_url, conf.broker_url, conf.broker_transport_options
        )
        return RedisTimer(location, settings, self.eta_timer, self.clock, self.events)

    @part
    def timer(self) -> Timer:
        """Arms rows in the calling thread."""
        return self.direct_timer or self.redis_timer or self.eta_timer

    @part
    def background_timer(self) -> BackgroundTimer | None:
        """The queue in front of the timer with `arm="background"`: producers do not wait."""
        if self.settings.arm != "background":
            return None
        from delaytasks.broker.arming import BackgroundTimer, can_run_threads

        return BackgroundTimer(self.timer, self.clock) if can_run_threads() else None

    @part
    def producer_timer(self) -> Timer:
        """Arms the rows of producers."""
        return self.background_timer or self.timer

    # -- schedule and sweep -----------------------------------------------------------------------

    @part
    def queues(self) -> QueueRouting:
        return QueueRouting(self.settings, self.registry)

    @part
    def producer(self) -> Producer:
        return Producer(
            self.settings,
            self.store.tasks,
            self.clock,
            self.new_id,
            self.producer_timer,
            self.registry,
            self.queues,
            self.events,
            None if self.direct_timer is None else self.direct_timer.notify,
        )

    @part
    def pauses(self) -> PauseSweeper:
        return PauseSweeper(
            self.settings,
            self.policy_cache,
            self.store.policies,
            self.store.paused_rows,
            self.clock,
            self.timer,
            self.events,
        )

    @part
    def sweeper(self) -> Sweeper:
        settings, store = self.settings, self.store
        return Sweeper(
            settings,
            store.sweeps,
            store.workers,
            self.clock,
            self.timer,
            self.events,
            self.pauses,
            self._make_recurring_tasks,
            self._purge_statistics if settings.statistics else None,
        )

    def _make_recurring_tasks(self, on_step: OnStep) -> None:
        if self.store.due_schedules.exist(self.settings.recurring_lead_s):
            self._creation.create(on_step)

    @part
    def _creation(self) -> Creation:
        from delaytasks.recurring.creation import Creation

        return Creation(
            self.settings, self.recurring_table, self.new_id, self.clock, self.timer, self.events
        )

    def _purge_statistics(self) -> None:
        from delaytasks.statistics.statistics_table import StatisticsTable

        StatisticsTable(self.store.database, self.store.schema).purge(self.clock.now())

    # -- operations -------------------------------------------------------------------------------

    @part
    def callbacks(self) -> Callbacks:
        return Callbacks(self.celery, self.settings, self.clock)

    @part
    def celery_tasks(self) -> CeleryTasks:
        return CeleryTasks(self)

    @part
    def message_publisher(self) -> PublishesMessages:
        """Publishes the messages of Celery tasks that waited as rows."""
        from delaytasks.broker.publisher import REFUSES_ALL_WRITES, bounded_connection
        from delaytasks.durable_eta.message_publisher import PUBLISH_LIMIT_S, MessagePublisher

        # The publisher waits for the confirmations of many messages together.
        connect = partial(
            bounded_connection, self.celery, PUBLISH_LIMIT_S, read_timeout=PUBLISH_LIMIT_S,
            confirm_publish=False,
        )  # fmt: skip
        return MessagePublisher(
            self.celery, connect, PUBLISH_LIMIT_S, self.clock.now, REFUSES_ALL_WRITES
        )

    @part
    def revocations(self) -> Revocations:
        return Revocations(self)

    @part
    def explanations(self) -> Explanations:
        from delaytasks.operate.explanations import Explanations

        return Explanations(self)

    @part
    def recurring_table(self) -> RecurringTable:
        from delaytasks.recurring.creation import RecurringTable

        return RecurringTable(self.store.database, self.store.schema)

    @part
    def checks(self) -> StartChecks:
        return StartChecks(self)

    @part
    def async_calls(self) -> AsyncCalls:
        return AsyncCalls(
            ThreadPool(self.settings.pool_size, "delaytasks-async"),
            self.clock,
            self.events,
            self.in_framework,
            self.transactions.current_session,
        )

    # -- end --------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Arm the entries that wait for the background timer. Return False if that takes too
        long.
        """
        return self.background_timer is None or self.background_timer.flush()

    def close(self) -> None:
        """Send the entries that wait to be armed, and close the connections of all made parts."""
        redis_timer = self._made("redis_timer")
        for each in (
            self._made("async_calls"),
            self._made("background_timer"),
            None if redis_timer is None else redis_timer.link,
            self._made("callbacks"),
            self._made("message_publisher"),
            self._made("publisher"),
            self._made("store"),
        ):
            if each is not None:
                each.close()

    def _made(self, name: str) -> Any:
        return self.__dict__.get(name)


class HasRuntime(Protocol):
    """A `DelayTasks`, as the packages below it see it."""

    _registry: Registry

    @property
    def _runtime(self) -> Runtime: ...

    async def _run_async(self, method: Any, /, *arguments: Any, **options: Any) -> Any: ...

    def _renew_runtime(self, **settings: Any) -> None: ...


def runtime_of(delays: HasRuntime) -> Runtime:
    """Return the objects behind `delays`."""
    return delays._runtime


def use_direct_timer(delays: HasRuntime) -> None:
    """From now on this process contacts neither broker nor Redis and finds near rows in the table.

    To be called before anything is scheduled or run.
    """
    if runtime_of(delays).settings.uses_broker:
        delays._renew_runtime(timer="direct")
