"""The composition root: makes the objects behind a `DelayTasks` from its settings."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.core.callbacks import CALLBACK
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
from delaytasks.operations.callbacks import Callbacks
from delaytasks.operations.lookup import Lookup
from delaytasks.operations.policies import PolicyOperations
from delaytasks.operations.single_tasks import SingleTasks
from delaytasks.operations.transactions import CallerTransactions
from delaytasks.processors.registry import Registry
from delaytasks.routing.shard import RetryTask, Shard
from delaytasks.routing.single_router import SingleRouter
from delaytasks.scheduling.producer import Producer
from delaytasks.scheduling.queue_routing import QueueRouting
from delaytasks.start_checks import StartChecks
from delaytasks.storage.migrations import urls_of
from delaytasks.storage.store import Store
from delaytasks.timers.eta import EtaTimer
from delaytasks.timers.publisher import Publisher
from delaytasks.wiring import Closable, ProcessorContext, Wiring

if TYPE_CHECKING:
    from delaytasks.encryption.cipher import Cipher
    from delaytasks.sharding.router import Router
    from delaytasks.timers.direct import DirectTimer
    from delaytasks.timers.redis import RedisTimer


def build_wiring(
    celery_app: Any,
    arguments: Mapping[str, Any],
    registry: Registry,
    events: Events,
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
    cipher = _make_cipher(settings)
    stores = [Store(url, settings, number, cipher) for number, url in enumerate(urls_of(settings))]
    clock = Clock(ask_now)
    clocks = [clock, *(Clock(store.tasks.now) for store in stores[1:])]

    publisher = Publisher(celery_app, settings.namespace, settings.publish_limit_s, events)
    timers = _make_timers(celery_app, settings, publisher, stores, clocks, events)
    queues = QueueRouting(settings, registry)
    registry.set_in_flight(CALLBACK, settings.callback_in_flight)
    callbacks = Callbacks(celery_app, settings, clock)
    router = _ShardFactory(settings, registry, events, queues, timers).router(stores, clocks)
    transactions = CallerTransactions(ambient_transaction)
    return Wiring(
        celery=celery_app,
        registry=registry,
        events=events,
        processor_contexts=processor_contexts,
        settings=settings,
        router=router,
        queues=queues,
        publisher=publisher,
        inline_timer=timers.inline,
        timer=timers.producers,
        direct_timer=timers.direct,
        redis_timer=timers.redis,
        callbacks=callbacks,
        transactions=transactions,
        lookup=Lookup(router, transactions),
        single=SingleTasks(router, transactions, events),
        bulk=BulkOperations(router, events),
        policies=PolicyOperations(router, events),
        checks=StartChecks(celery_app, settings, registry, events, router, timers.redis),
        closables=[*timers.closables, callbacks, publisher, *stores],
    )


class _ShardFactory(NamedTuple):
    """Makes the shards and their router."""

    settings: Settings
    registry: Registry
    events: Events
    queues: QueueRouting
    timers: _Timers

    def router(self, stores: Sequence[Store], clocks: Sequence[Clock]) -> Router:
        if len(stores) == 1:
            [store], [clock] = stores, clocks
            tasks, timer = store.tasks, self.timers.inline
            return SingleRouter(
                self._shard(store, clock, tasks, tasks.retry, timer, self.events, lambda: None)
            )
        from delaytasks.sharding.databases import Shards, ShardTasks
        from delaytasks.sharding.router import ShardRouter
        from delaytasks.sharding.selection import ShardSelection
        from delaytasks.timers.shard_timer import ShardTimer

        databases = Shards(stores, self.settings.shards_before)
        shards = [
            self._shard(
                store,
                clock,
                ShardTasks(databases, store.shard),
                functools.partial(databases.retry, store.shard),
                ShardTimer(self.timers.inline, store.shard),
                self.events.about(shard=store.shard),
                functools.partial(databases.store, store.shard),
            )
            for store, clock in zip(stores, clocks, strict=True)
        ]
        return ShardRouter(shards, databases, ShardSelection(len(stores), self.events))

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
        settings, events, number = self.settings, self.events, store.shard
        new_id = IdMaker(wall_ms, number)
        policies = PolicyCache(store.policies.changes)
        pauses = PauseSweeper(
            settings, policies, store.policies, store.paused_rows, clock, timer, sweep_events
        )
        sweeper = Sweeper(settings, store.sweeps, store.workers, clock, timer, sweep_events, pauses)
        producer = Producer(
            settings,
            tasks,
            clock,
            new_id,
            self.timers.producers,
            self.registry,
            self.queues,
            events,
            number,
            None if self.timers.direct is None else self.timers.direct.notify,
        )
        url = Secret(store.database.url.render_as_string(hide_password=False))
        return Shard(
            number, url, new_id, clock, sweeper, producer, policies, retry, store, check_number
        )


class _Timers(NamedTuple):
    #: Arms in the calling thread.
    inline: Timer
    #: Arms for producers; with `arm="background"`, in a thread of its own.
    producers: Timer
    direct: DirectTimer | None
    redis: RedisTimer | None
    closables: Sequence[Closable]


def _make_cipher(settings: Settings) -> Cipher | None:
    if not settings.encryption_keys:
        return None
    from delaytasks.encryption.cipher import Cipher  # loads cryptography

    return Cipher(settings.encryption_keys)


def _make_timers(
    celery_app: Any,
    settings: Settings,
    publisher: Publisher,
    stores: Sequence[Store],
    clocks: Sequence[Clock],
    events: Events,
) -> _Timers:
    closables: list[Closable] = []
    redis = direct = None
    eta = EtaTimer(publisher, clocks[0])
    if not settings.uses_broker:
        from delaytasks.timers.direct import DirectTimer

        direct = DirectTimer([store.notices for store in stores], clocks[0])
    elif settings.timer == "redis":
        from delaytasks.timers.redis import RedisTimer
        from delaytasks.timers.redis_location import redis_location

        conf = celery_app.conf
        location = redis_location(
            settings.redis_url, conf.broker_url, conf.broker_transport_options
        )
        redis = RedisTimer(location, settings, eta, clocks, events)
        closables.append(redis.link)
    inline: Timer = direct or redis or eta
    if settings.arm != "background":
        return _Timers(inline, inline, direct, redis, closables)
    from delaytasks.timers.background import BackgroundTimer

    background = BackgroundTimer(inline, clocks[0])
    return _Timers(inline, background, direct, redis, [background, *closables])
