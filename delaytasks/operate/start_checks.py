"""Checks at the start of a process, and the entries of beat's schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.broker.arming import SWEEP
from delaytasks.model.errors import ConfigError, StoreUnavailableError
from delaytasks.model.text import shown

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


# -- the entries of Celery beat's schedule that make it sweep -------------------------------------


def add_sweeps(celery_app: Any, runtime: Runtime) -> None:
    """Add an entry for each sweep partition to the schedule, unless it has sweep entries."""
    settings = runtime.settings
    schedule = celery_app.conf.beat_schedule
    if not any(entry.get("task") == SWEEP for entry in schedule.values()):
        for sweep_partition in range(settings.sweep_partitions):
            entry = {"task": SWEEP, "schedule": settings.sweep_s, "args": (sweep_partition,)}
            schedule[f"delaytasks-sweep-{sweep_partition}"] = entry


def check_sweeps(runtime: Runtime) -> None:
    """Raise `ConfigError` if an entry names a sweep partition that does not exist."""
    settings, count = runtime.settings, runtime.settings.sweep_partitions
    for name, entry in (runtime.celery.conf.beat_schedule or {}).items():
        sweep_partition, *_ = entry.get("args") or (0,)
        if entry.get("task") == SWEEP and not settings.has_sweep_partition(sweep_partition):
            raise ConfigError(
                f"beat_schedule[{name!r}] names sweep partition {shown(sweep_partition)}, and "
                f"delaytasks_sweep has {count}: the sweep partitions are 0 to "
                f"{count - 1}; correct its args, or "
                "leave the entries to delaytasks"
            )


#: The default of kombu.
REDIS_VISIBILITY_S = 3600.0
#: Content types that cannot carry code.
SAFE_CONTENT = {"json", "application/json", "msgpack", "application/x-msgpack"}
_REDIS_SCHEMES = ("redis", "unix:", "sentinel:")


class StartChecks:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def check_ready(self) -> None:
        """Check the settings and the database."""
        self.check_settings()
        try:
            self._runtime.store.check()
            self._check_other_deployments()
        except StoreUnavailableError as error:
            # Not an error of the configuration: a worker waits until the database is back.
            self._runtime.events.emit("store.down", error=str(error))

    def _check_other_deployments(self) -> None:
        """Report another deployment on the same tables, which takes our tasks to its own queues."""
        runtime, settings = self._runtime, self._runtime.settings
        if settings.uses_broker and runtime.store.sweeps.is_shared(settings.silent_s):
            remedy = (
                "give both the same delaytasks_namespace and broker, or tables of their own "
                "(delaytasks_table_prefix); if you have changed it, stop the old workers"
            )
            runtime.events.emit("tables.shared", namespace=settings.namespace, remedy=remedy)

    def check_settings(self) -> None:
        """Check the settings without any connection."""
        self.check_broker()
        check_sweeps(self._runtime)

    def check_broker(self) -> None:
        self._check_visibility()
        accepted = set(self._runtime.celery.conf.accept_content or ())
        unsafe = ", ".join(sorted(map(str, accepted - SAFE_CONTENT)))
        if unsafe:
            remedy = (
                "accept_content = ['json'], or keep all but your own producers out of the broker"
            )
            self._runtime.events.emit("content.unsafe", accepts=unsafe, remedy=remedy)

    def _check_visibility(self) -> None:
        """Compare the horizon with the time after which a broker delivers a message again.

        Our messages are acknowledged on receipt, but a blocked worker may leave them waiting.
        """
        conf, horizon = self._runtime.celery.conf, self._runtime.settings.horizon_s
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
                f"delaytasks_horizon = {horizon:g} s is not below the broker's "
                f"visibility_timeout = {visible_s:g}: messages could be delivered twice; lower "
                "the horizon, or raise visibility_timeout in broker_transport_options"
            )
