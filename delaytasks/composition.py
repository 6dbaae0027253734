"""The composition root: makes the objects behind a `DelayTasks` from its settings."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.core.callbacks import CALLBACK
from delaytasks.core.clock import Clock, Measure, wall_ms
from delaytasks.core.encryption import Cipher
from delaytasks.core.events import Events
from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import TaskStore, Timer, Transaction
from delaytasks.core.masking import Secret
from delaytasks.core.private_files import tighten_data_folder
from delaytasks.core.settings import Settings, load_settings
from delaytasks.core.thread_pool import ThreadPool
from delaytasks.environment import PRODUCTION, Environment
from delaytasks.execution.policy_cache import PolicyCache
from delaytasks.maintenance.overdue_queues import OnStep
from delaytasks.maintenance.pause_sweeper import PauseSweeper
from delaytasks.maintenance.recurring_stage import RecurringStage
from delaytasks.maintenance.statistics_stage import Maintain, StatisticsStage
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.operations.bulk import BulkOperations
from delaytasks.operations.celery_tasks import CeleryTasks
from delaytasks.operations.lookup import Lookup
from delaytasks.operations.policies import PolicyOperations
from delaytasks.operations.revocations import Revocations
from delaytasks.operations.single_tasks import SingleTasks
from delaytasks.operations.transactions import CallerTransactions
from delaytasks.operations.waiting import Waiting
from delaytasks.processors.registry import Registry
from delaytasks.routing.shard import RerunTask, Shard
from delaytasks.routing.single_router import SingleRouter
from delaytasks.scheduling.producer import Producer
from delaytasks.scheduling.queue_routing import QueueRouting
from delaytasks.start_checks import StartChecks
from delaytasks.storage.migrations import urls_of
from delaytasks.storage.store import Store
from delaytasks.timers.eta import EtaTimer
from delaytasks.timers.publisher import Publisher
from delaytasks.twins import AsyncCalls, InFramework
from delaytasks.wiring import Closable, ProcessorContext, Wiring

if TYPE_CHECKING:
    from delaytasks.forecast.operations import ForecastOperations
    from delaytasks.operations.why import Explanations
    from delaytasks.recurrence.operations import RecurringOperations
    from delaytasks.sharding.router import Router
    from delaytasks.timers.background import BackgroundTimer
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
    in_framework: InFramework,
    tables_remedy: str,
    environment: Environment = PRODUCTION,
) -> Wiring:
    """Make everything that needs settings, once the Celery app is configured.

    `arguments` are the settings given to `DelayTasks`. `ask_now` reads the time of the first
    database. `ambient_transaction` returns the transaction of a call without `session=`.
    `in_framework` runs the calls of coroutines as a web framework requires. `tables_remedy` says
    in messages how to make the tables. A test replaces parts by its `environment`.
    """
    settings = load_settings(celery_app.conf, os.environ, **arguments)
    if settings.has_structured_log:
        from delaytasks.core.structured_log import log_structured

        events.use_log(log_structured)
    if not settings.database_url:
        tighten_data_folder(Path(settings.data_dir))
    cipher = Cipher(settings.encryption_keys) if settings.encryption_keys else None
    make_clock, make_database = environment.make_clock, environment.make_database
    stores = [
        Store(url, settings, number, cipher, make_database, tables_remedy)
        for number, url in enumerate(urls_of(settings))
    ]
    clock = make_clock(ask_now)
    clocks = [clock, *(make_clock(store.tasks.now) for store in stores[1:])]

    publisher = Publisher(celery_app, settings.namespace, settings.publish_limit_s, events)
    if environment.timer is not None:
        timers = _Timers(environment.timer, None, None, None, [])
    else:
        timers = _make_timers(celery_app, settings, publisher, stores, clocks, events)
    queues = QueueRouting(settings, registry)
    registry.set_in_flight(CALLBACK, settings.callback_in_flight)
    callbacks = environment.make_callbacks(celery_app, settings, clock)
    router = _ShardFactory(settings, registry, events, queues, timers).router(stores, clocks)

    def remedy_at(url: Any) -> str:
        store = next((each for each in stores if each.database.may_be_at(url)), stores[0])
        return store.database.remedy_at(url)

    transactions = CallerTransactions(ambient_transaction, remedy_at)
    waiting = Waiting(router)
    threads = ThreadPool(settings.pool_size, "delaytasks-async")
    async_calls = AsyncCalls(threads, clocks, events, in_framework, transactions.current_session)
    single = SingleTasks(router, transactions, events)
    celery_tasks = CeleryTasks(
        celery_app, settings, router, transactions, clock, events, environment.publisher
    )
    recurring = functools.cache(
        functools.partial(_recurring_operations, celery_app, events, router, transactions)
    )
    return Wiring(
        celery=celery_app,
        registry=registry,
        events=events,
        processor_contexts=[*environment.processor_contexts, *processor_contexts],
        settings=settings,
        router=router,
        queues=queues,
        publisher=publisher,
        timer=timers.inline,
        producer_timer=timers.background or timers.inline,
        background_timer=timers.background,
        direct_timer=timers.direct,
        redis_timer=timers.redis,
        callbacks=callbacks,
        celery_tasks=celery_tasks,
        revocations=Revocations(celery_app, router, transactions, single),
        transactions=transactions,
        lookup=Lookup(router, transactions),
        single=single,
        bulk=BulkOperations(router, events),
        waiting=waiting,
        explanations=functools.cache(
            functools.partial(_explanations, celery_app, settings, router, publisher, timers.redis)
        ),
        policies=PolicyOperations(router, events),
        recurring=recurring,
        forecasts=functools.cache(
            functools.partial(
                _forecast_operations, celery_app, settings, registry, router, recurring
            )
        ),
        checks=StartChecks(celery_app, settings, registry, events, router, timers.redis),
        async_calls=async_calls,
        closables=[
            async_calls,
            *timers.closables,
            callbacks,
            celery_tasks,
            publisher,
            *stores,
        ],
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
                self._shard(store, clock, tasks, tasks.rerun, timer, self.events, lambda: None)
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
                functools.partial(databases.rerun, store.shard),
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
        rerun: RerunTask,
        timer: Timer,
        sweep_events: Events,
        check_number: Callable[[], object],
    ) -> Shard:
        settings, events, number = self.settings, self.events, store.shard
        new_id = IdMaker(wall_ms, number or settings.shard)
        policies = PolicyCache(store.policies.changes)
        pauses = PauseSweeper(
            settings, policies, store.policies, store.paused_rows, clock, timer, sweep_events
        )
        recurring = RecurringStage(
            settings,
            store.due_schedules,
            functools.cache(lambda: _creation(settings, store, new_id, clock, timer, sweep_events)),
        )
        sweeper = Sweeper(
            settings,
            store.sweeps,
            store.workers,
            clock,
            timer,
            sweep_events,
            pauses,
            recurring,
            _statistics_stage(settings, store, clock),
        )
        producer = Producer(
            settings,
            tasks,
            clock,
            new_id,
            self.timers.background or self.timers.inline,
            self.registry,
            self.queues,
            events,
            number,
            None if self.timers.direct is None else self.timers.direct.notify,
        )
        url = Secret(store.database.url.render_as_string(hide_password=False))
        return Shard(
            number, url, new_id, clock, sweeper, producer, policies, rerun, store, check_number
        )


class _Timers(NamedTuple):
    #: Arms in the calling thread.
    inline: Timer
    #: Arms for producers in a thread of its own, with `arm="background"`.
    background: BackgroundTimer | None
    direct: DirectTimer | None
    redis: RedisTimer | None
    closables: Sequence[Closable]


def _creation(
    settings: Settings,
    store: Store,
    new_id: Callable[[], int],
    clock: Clock,
    timer: Timer,
    events: Events,
) -> Callable[[OnStep], None]:
    """Return the function that makes the tasks of the recurring schedules of a database."""
    from delaytasks.recurrence.creation import Creation
    from delaytasks.recurrence.queries import RecurringTable

    table = RecurringTable(store.database, store.schema)
    return Creation(settings, table, new_id, clock, timer, events).create


def _statistics_stage(settings: Settings, store: Store, clock: Clock) -> StatisticsStage | None:
    def load() -> Maintain:
        from delaytasks.statistics.maintenance import StatisticsMaintenance

        return StatisticsMaintenance(settings, store, clock).run

    return StatisticsStage(functools.cache(load)) if settings.statistics else None


def _explanations(*parts: Any) -> Explanations:
    from delaytasks.operations.why import Explanations

    return Explanations(*parts)


def _recurring_operations(
    celery_app: Any, events: Events, router: Router, transactions: CallerTransactions
) -> RecurringOperations:
    from delaytasks.recurrence.operations import RecurringOperations

    tz = str(celery_app.conf.timezone or "UTC")
    return RecurringOperations(router, transactions.of, events, tz)


def _forecast_operations(
    celery_app: Any,
    settings: Settings,
    registry: Registry,
    router: Router,
    recurring: Callable[[], RecurringOperations],
) -> ForecastOperations:
    from delaytasks.forecast.operations import ForecastOperations

    processes = celery_app.conf.worker_concurrency
    return ForecastOperations(settings, registry, router, recurring, processes)


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
    background = None
    if settings.arm == "background":
        from delaytasks.timers.background import BackgroundTimer, can_run_threads

        if can_run_threads():
            background = BackgroundTimer(inline, clocks[0])
            closables.insert(0, background)
    return _Timers(inline, background, direct, redis, closables)
