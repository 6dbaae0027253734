"""Checks of the configuration and of the databases, with a remedy in each error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from delaytasks.beat import check_sweeps
from delaytasks.core.encryption import names_of
from delaytasks.core.errors import ConfigError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.settings import Settings
from delaytasks.core.text import shown
from delaytasks.processors.registry import Registry
from delaytasks.routing.shard import Shard

if TYPE_CHECKING:
    from delaytasks.maintenance.deploy_check import Finding
    from delaytasks.sharding.router import Router
    from delaytasks.timers.redis import RedisTimer

#: The default of kombu.
REDIS_VISIBILITY_S = 3600.0
#: Content types that cannot carry code.
SAFE_CONTENT = {"json", "application/json", "msgpack", "application/x-msgpack"}
_REDIS_SCHEMES = ("redis", "unix:", "sentinel:")


class StartChecks:
    def __init__(
        self,
        celery_app: Any,
        settings: Settings,
        registry: Registry,
        events: Events,
        router: Router,
        redis_timer: RedisTimer | None,
    ) -> None:
        self._celery = celery_app
        self._settings = settings
        self._registry = registry
        self._events = events
        self._router = router
        self._redis_timer = redis_timer

    def check_ready(self) -> None:
        """Check the settings, the timer and the databases."""
        self.check_settings()
        if self._redis_timer is not None:
            self._redis_timer.link.check()
        self._check_databases()

    def check_settings(self) -> None:
        """Check the settings without any connection."""
        self.check_broker()
        check_sweeps(self._celery, self._settings)

    def check_broker(self) -> None:
        self._check_visibility()
        accepted = set(self._celery.conf.accept_content or ())
        unsafe = ", ".join(sorted(map(str, accepted - SAFE_CONTENT)))
        if unsafe:
            remedy = (
                "accept_content = ['json'], or keep all but your own producers out of the broker"
            )
            self._events.emit("content.unsafe", accepts=unsafe, remedy=remedy)

    def findings(self) -> Iterator[Finding]:
        """Yield the waiting tasks that this code cannot run."""
        from delaytasks.maintenance.deploy_check import find_problems
        from delaytasks.storage.stats import Stats

        settings = self._settings
        keys = names_of(settings.encryption_keys)
        for shard in self._router.shards:
            stats = Stats(shard.store.database, shard.store.schema)
            untrusted = stats.strange(settings.max_delay_s, settings.lease_s)
            yield from find_problems(stats.pending(), stats.bodies, self._registry, untrusted, keys)

    def _check_visibility(self) -> None:
        """Compare the horizon with the time after which a broker delivers a message again.

        Our messages are acknowledged on receipt, but a blocked worker may leave them waiting.
        """
        conf, horizon = self._celery.conf, self._settings.horizon_s
        broker = conf.broker_url
        first = str(broker[0] if isinstance(broker, (list, tuple)) and broker else broker)
        default = REDIS_VISIBILITY_S if first.startswith(_REDIS_SCHEMES) else None
        visibility = (conf.broker_transport_options or {}).get("visibility_timeout", default)
        try:
            visible_s = None if visibility is None else float(visibility)
        except (TypeError, ValueError):
            raise ConfigError(
                f"visibility_timeout = {shown(visibility)} in broker_transport_options is no "
                "number of seconds"
            ) from None
        if horizon is not None and visible_s is not None and horizon >= visible_s:
            raise ConfigError(
                f"delaytasks_horizon_s = {horizon:g} is not below the broker's "
                f"visibility_timeout = {visible_s:g}: messages could be delivered twice; lower "
                "the horizon, or raise visibility_timeout in broker_transport_options"
            )

    def _check_databases(self) -> None:
        stores = self._router.stores

        def check(shard: Shard) -> None:
            try:
                stores[shard.number].check()
            except StoreUnavailableError as error:
                # Not an error of the configuration: a worker waits until the database is back.
                self._events.emit("store.down", error=str(error), shard=shard.number)

        for silent in self._router.each(check):
            self._events.emit("store.down", error=f"{silent} does not answer", shard=silent.number)
