"""Checks of the configuration and of the database, with a remedy in each error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delaytasks.beat import check_sweeps
from delaytasks.core.encryption import names_of
from delaytasks.core.errors import ConfigError, StoreUnavailableError
from delaytasks.core.text import shown

if TYPE_CHECKING:
    from delaytasks.maintenance.deploy_check import Finding
    from delaytasks.runtime import Runtime

#: The default of kombu.
REDIS_VISIBILITY_S = 3600.0
#: Content types that cannot carry code.
SAFE_CONTENT = {"json", "application/json", "msgpack", "application/x-msgpack"}
_REDIS_SCHEMES = ("redis", "unix:", "sentinel:")


class StartChecks:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._celery = runtime.celery
        self._settings = runtime.settings
        self._events = runtime.events

    def check_ready(self) -> None:
        """Check the settings, the timer and the database."""
        self.check_settings()
        redis_timer = self._runtime.redis_timer
        if redis_timer is not None:
            redis_timer.link.check()
        try:
            self._runtime.store.check()
        except StoreUnavailableError as error:
            # Not an error of the configuration: a worker waits until the database is back.
            self._events.emit("store.down", error=str(error))

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
        stats = Stats(self._runtime.store.database, self._runtime.store.schema)
        untrusted = stats.strange(settings.max_delay_s, settings.lease_s)
        registry = self._runtime.registry
        yield from find_problems(stats.pending(), stats.bodies, registry, untrusted, keys)

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
