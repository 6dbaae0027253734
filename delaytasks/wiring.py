"""The composition root: from settings to everything wired."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from delaytasks.core.clock import Clock, Measure, wall_ms
from delaytasks.core.errors import ConfigError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import TaskStore, Timer
from delaytasks.core.masking import Secret
from delaytasks.core.private_files import tighten_data_folder
from delaytasks.core.settings import load_settings
from delaytasks.core.text import shown
from delaytasks.execution.policy_cache import PolicyCache
from delaytasks.maintenance.pause_sweeper import PauseSweeper
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.processors.registry import Registry
from delaytasks.scheduling.producer import Producer
from delaytasks.scheduling.queue_routing import QueueRouting
from delaytasks.sharding.databases import Shards, ShardTasks
from delaytasks.sharding.router import ShardRouter
from delaytasks.sharding.selection import ShardSelection
from delaytasks.sharding.shard import Shard
from delaytasks.storage.migrations import urls_of
from delaytasks.storage.store import Store
from delaytasks.timers.background import BackgroundTimer
from delaytasks.timers.broker_link import bounded_connection
from delaytasks.timers.direct import DirectTimer
from delaytasks.timers.eta import EtaTimer
from delaytasks.timers.publisher import Publisher
from delaytasks.timers.shard_timer import ShardTimer
from delaytasks.webhooks.addresses import Guard
from delaytasks.webhooks.http import CALLBACK, HttpCallbacks
from delaytasks.webhooks.queue import QueueMessages

if TYPE_CHECKING:
    from delaytasks.timers.redis import RedisTimer

#: kombu's own default.
REDIS_VISIBILITY_S = 3600.0
#: Content that is data, whoever wrote it: Celery's `json` and what is as harmless.
SAFE_CONTENT = {"json", "application/json", "msgpack", "application/x-msgpack"}
_REDIS_SCHEMES = ("redis", "unix:", "sentinel:")


class Wiring:
    """Everything that needs settings: made on first use, when the Celery app is configured."""

    def __init__(
        self,
        app: Any,
        arguments: Mapping[str, Any],
        registry: Registry,
        events: Events,
        measure: Measure,
    ) -> None:
        self._app = app
        self.settings = load_settings(app.conf, os.environ, **arguments)
        settings = self.settings
        self._events = events
        if not settings.database_url:
            tighten_data_folder(Path(settings.data_dir))
        stores = [Store(url, settings, number) for number, url in enumerate(urls_of(settings))]
        self._databases = Shards(stores, settings.shards_before)
        clock = Clock(measure)
        clocks = [clock, *(Clock(store.tasks.now) for store in stores[1:])]
        self.publisher = Publisher(app, settings.namespace, settings.publish_limit_s, events)
        eta = EtaTimer(self.publisher, clock)
        self.redis_timer = (
            self._make_redis_timer(eta, clocks) if settings.timer == "redis" else None
        )
        is_direct = settings.timer == "direct"
        self.direct_timer = (
            DirectTimer([store.notices for store in stores], clock) if is_direct else None
        )
        self.inline_timer: Timer = self.direct_timer or self.redis_timer or eta
        self.timer: Timer = (
            BackgroundTimer(self.inline_timer, clock)
            if settings.arm == "background"
            else self.inline_timer
        )
        self.queues = QueueRouting(settings, registry)
        registry.give_places(CALLBACK, settings.callback_in_flight)
        self.http_callbacks = HttpCallbacks(settings, Guard(settings.callback_allow), clock)
        limit_s, url = settings.callback_connect_s, settings.callback_broker_url
        self.queue_messages = QueueMessages(
            functools.partial(bounded_connection, app, limit_s, url, confirm_publish=True), limit_s
        )
        shards = [self._make_shard(*both, registry) for both in zip(stores, clocks, strict=True)]
        self.routes = ShardRouter(shards, self._databases, ShardSelection(len(stores), events))

    def _make_shard(self, store: Store, clock: Clock, registry: Registry) -> Shard:
        settings, number = self.settings, store.shard
        events = swept = self._events
        tasks, timer, new_id = (
            cast(TaskStore, store.tasks),
            self.inline_timer,
            IdMaker(wall_ms, number),
        )
        if len(self._databases.stores) > 1:
            tasks, timer = ShardTasks(self._databases, number), ShardTimer(timer, number)
            swept = events.about(shard=number)
        policies = PolicyCache(store.policies.changes)
        holding = PauseSweeper(
            settings, policies, store.policies, store.holding, clock, timer, events
        )
        sweeper = Sweeper(settings, store.sweeps, store.workers, clock, timer, swept, holding)
        tell = None if self.direct_timer is None else self.direct_timer.tell
        producer = Producer(
            settings, tasks, clock, new_id, self.timer, registry, self.queues, events, number, tell
        )
        url = Secret(store.database.url.render_as_string(hide_password=False))
        return Shard(number, url, new_id, clock, sweeper, producer, policies, self._databases)

    def _make_redis_timer(self, eta: EtaTimer, clocks: Sequence[Clock]) -> RedisTimer:
        # With a client that other deployments need not load.
        from delaytasks.timers.redis import RedisTimer
        from delaytasks.timers.redis_location import redis_location

        conf = self._app.conf
        place = redis_location(
            self.settings.redis_url, conf.broker_url, conf.broker_transport_options
        )
        return RedisTimer(place, self.settings, eta, clocks, self._events)

    def check_broker(self) -> None:
        self._check_visibility()
        unsafe = ", ".join(
            sorted(map(str, set(self._app.conf.accept_content or ()) - SAFE_CONTENT))
        )
        if unsafe:
            remedy = (
                "accept_content = ['json'], or keep all but your own producers out of the broker"
            )
            self._events.emit("content.unsafe", accepts=unsafe, remedy=remedy)

    def _check_visibility(self) -> None:
        """Our messages are acknowledged on receipt; but they may wait unacknowledged in a worker that is blocked."""
        horizon = self.settings.horizon_s
        broker = self._app.conf.broker_url
        first = str(broker[0] if isinstance(broker, (list, tuple)) and broker else broker)
        default = REDIS_VISIBILITY_S if first.startswith(_REDIS_SCHEMES) else None
        visibility = (self._app.conf.broker_transport_options or {}).get(
            "visibility_timeout", default
        )
        try:
            visible_s = None if visibility is None else float(visibility)
        except (TypeError, ValueError):
            raise ConfigError(
                f"visibility_timeout = {shown(visibility)} in broker_transport_options is no number of seconds"
            ) from None
        if horizon is not None and visible_s is not None and horizon >= visible_s:
            raise ConfigError(
                f"delaytasks_horizon_s = {horizon:g} is not below the broker's visibility_timeout = {visible_s:g}: "
                "messages could be delivered twice; lower the horizon, or raise visibility_timeout in "
                "broker_transport_options"
            )

    def check_timer(self) -> None:
        if self.redis_timer is not None:
            self.redis_timer.link.check()

    def check_databases(self) -> None:
        def check(shard: Shard) -> None:
            try:
                self._databases.stores[shard.number].check()
            except StoreUnavailableError as error:
                # It may come back: a worker waits for it.
                self._events.emit("store.down", error=str(error), shard=shard.number)

        for silent in self.routes.each(check):
            self._events.emit("store.down", error=f"{silent} does not answer", shard=silent.number)

    def close(self) -> None:
        if isinstance(self.timer, BackgroundTimer):
            self.timer.close()
        if self.redis_timer is not None:
            self.redis_timer.link.close()
        self.http_callbacks.close()
        self.queue_messages.close()
        self.publisher.close()
        for store in self._databases.stores:
            store.close()
