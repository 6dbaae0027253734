"""The composition root: makes the objects behind a `DelayTasks` from its settings."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delaytasks.core.clock import Clock, Measure, wall_ms
from delaytasks.core.events import Events
from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import TaskStore, Timer, Transaction
from delaytasks.core.masking import Secret
from delaytasks.core.private_files import tighten_data_folder
from delaytasks.core.settings import Settings, load_settings
from delaytasks.execution.policy_cache import PolicyCache
from delaytasks.maintenance.pause_sweeper import PauseSweeper
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.operations.bulk import BulkOperations
from delaytasks.operations.lookup import Lookup
from delaytasks.operations.policies import PolicyOperations
from delaytasks.operations.single_tasks import SingleTasks
from delaytasks.operations.transactions import CallerTransactions
from delaytasks.processors.registry import Registry
from delaytasks.scheduling.producer import Notify, Producer
from delaytasks.scheduling.queue_routing import QueueRouting
from delaytasks.sharding.shard import RetryTask, Shard
from delaytasks.sharding.single_router import SingleRouter
from delaytasks.start_checks import StartChecks
from delaytasks.storage.migrations import urls_of
from delaytasks.storage.store import Store
from delaytasks.timers.background import BackgroundTimer
from delaytasks.timers.broker_link import bounded_connection
from delaytasks.timers.direct import DirectTimer
from delaytasks.timers.eta import EtaTimer
from delaytasks.timers.publisher import Publisher
from delaytasks.webhooks.addresses import Guard
from delaytasks.webhooks.http import CALLBACK, HttpCallbacks
from delaytasks.webhooks.queue import QueueMessages
from delaytasks.wiring import Closable, ProcessorContext, Router, Wiring

if TYPE_CHECKING:
    from delaytasks.timers.redis import RedisTimer
    from delaytasks.worker.processes import Processes


def build_wiring(
    celery_app: Any,
    arguments: Mapping[str, Any],
    registry: Registry,
    events: Events,
    processes: Processes,
    ask_now: Measure,
    ambient_transaction: Callable[[], Transaction | None],
    processor_contexts: Sequence[ProcessorContext],
) -> Wiring:
    """Make everything that needs settings, once the Celery app is configured.

    `arguments` are the settings given to `DelayTasks`. `ask_now` reads the time of the first
    database. `ambient_transaction` returns the transaction of a call without `session=`.
    """
    settings = load_settings(celery_app.conf, os.environ, **arguments)
    if not settings.database_url:
        tighten_data_folder(Path(settings.data_dir))
    stores = [Store(url, settings, number) for number, url in enumerate(urls_of(settings))]
    clock = Clock(ask_now)
    clocks = [clock, *(Clock(store.tasks.now) for store in stores[1:])]

    publisher = Publisher(celery_app, settings.namespace, settings.publish_limit_s, events)
    eta = EtaTimer(publisher, clock)
    redis_timer = direct_timer = None
    if settings.timer == "redis":
        redis_timer = _redis_timer(celery_app, settings, eta, clocks, events)
    elif settings.timer == "direct":
        direct_timer = DirectTimer([store.notices for store in stores], clock)
    inline_timer: Timer = direct_timer or redis_timer or eta
    background = BackgroundTimer(inline_timer, clock) if settings.arm == "background" else None
    timer: Timer = background or inline_timer

    queues = QueueRouting(settings, registry)
    registry.give_places(CALLBACK, settings.callback_in_flight)
    http_callbacks = HttpCallbacks(settings, Guard(settings.callback_allow), clock)
    limit_s, broker_url = settings.callback_connect_s, settings.callback_broker_url
    connect = functools.partial(
        bounded_connection, celery_app, limit_s, broker_url, confirm_publish=True
    )
    queue_messages = QueueMessages(connect, limit_s)

    factory = _ShardFactory(settings, registry, events, queues, timer, inline_timer, direct_timer)
    router = factory.router(stores, clocks)
    transactions = CallerTransactions(ambient_transaction)
    closables: list[Closable | None] = [
        background,
        None if redis_timer is None else redis_timer.link,
        http_callbacks,
        queue_messages,
        publisher,
        *stores,
    ]
    return Wiring(
        celery=celery_app,
        registry=registry,
        events=events,
        processes=processes,
        processor_contexts=processor_contexts,
        settings=settings,
        router=router,
        queues=queues,
        publisher=publisher,
        inline_timer=inline_timer,
        timer=timer,
        direct_timer=direct_timer,
        redis_timer=redis_timer,
        http_callbacks=http_callbacks,
        queue_messages=queue_messages,
        transactions=transactions,
        lookup=Lookup(router, transactions),
        single=SingleTasks(router, transactions, events),
        bulk=BulkOperations(router, events),
        policies=PolicyOperations(router, events),
        checks=StartChecks(celery_app, settings, registry, events, router, redis_timer),
        closables=[closable for closable in closables if closable is not None],
    )


class _ShardFactory:
    """Makes the shards and their router."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        events: Events,
        queues: QueueRouting,
        timer: Timer,
        inline_timer: Timer,
        direct_timer: DirectTimer | None,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._events = events
        self._queues = queues
        self._timer = timer
        self._inline_timer = inline_timer
        self._notify: Notify | None = None if direct_timer is None else direct_timer.tell

    def router(self, stores: Sequence[Store], clocks: Sequence[Clock]) -> Router:
        if len(stores) == 1:
            [store], [clock] = stores, clocks
            tasks, timer = store.tasks, self._inline_timer
            return SingleRouter(
                self._shard(store, clock, tasks, tasks.retry, timer, self._events, lambda: None)
            )
        from delaytasks.sharding.router import ShardRouter
        from delaytasks.sharding.selection import ShardSelection
        from delaytasks.storage.shards import Shards, ShardTasks
        from delaytasks.timers.shard_timer import ShardTimer

        databases = Shards(stores, self._settings.shards_before)
        shards = [
            self._shard(
                store,
                clock,
                ShardTasks(databases, store.shard),
                functools.partial(databases.retry, store.shard),
                ShardTimer(self._inline_timer, store.shard),
                self._events.about(shard=store.shard),
                functools.partial(databases.store, store.shard),
            )
            for store, clock in zip(stores, clocks, strict=True)
        ]
        return ShardRouter(shards, databases, ShardSelection(len(stores), self._events))

    def _shard(
        self,
        store: Store,
        clock: Clock,
        tasks: TaskStore,
        retry: RetryTask,
        timer: Timer,
        sweep_events: Events,
        check_number: Callable[[], object],
    ) -> Shard:
        settings, events, number = self._settings, self._events, store.shard
        new_id = IdMaker(wall_ms, number)
        policies = PolicyCache(store.policies.changes)
        pauses = PauseSweeper(
            settings, policies, store.policies, store.holding, clock, timer, events
        )
        sweeper = Sweeper(settings, store.sweeps, store.workers, clock, timer, sweep_events, pauses)
        producer = Producer(
            settings,
            tasks,
            clock,
            new_id,
            self._timer,
            self._registry,
            self._queues,
            events,
            number,
            self._notify,
        )
        url = Secret(store.database.url.render_as_string(hide_password=False))
        return Shard(
            number, url, new_id, clock, sweeper, producer, policies, retry, store, check_number
        )


def _redis_timer(
    celery_app: Any, settings: Settings, eta: EtaTimer, clocks: Sequence[Clock], events: Events
) -> RedisTimer:
    # Imported here: other deployments need no Redis client.
    from delaytasks.timers.redis import RedisTimer
    from delaytasks.timers.redis_location import redis_location

    conf = celery_app.conf
    location = redis_location(settings.redis_url, conf.broker_url, conf.broker_transport_options)
    return RedisTimer(location, settings, eta, clocks, events)
