"""Check-ins for Sentry's monitors of recurring schedules."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from celery import current_app
from sentry_sdk.crons import capture_checkin

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.task import DelayTask

if TYPE_CHECKING:
    from sentry_sdk._types import MonitorConfig

    from delaytasks.recurrence.schedule import RecurringSchedule

#: How long the definition of a schedule is kept.
MONITOR_DEFINITION_KEPT_S = 300.0
#: The most definitions that are kept, since callers may choose keys that look like occurrences.
MAX_MONITOR_DEFINITIONS = 1000
#: Minutes after which Sentry takes an occurrence for missed.
MARGIN_MINUTES = 5
#: The longest slug in Sentry.
MAX_SLUG = 50


class BegunCheckIn(NamedTuple):
    """A check-in whose task runs."""

    slug: str
    id: str
    began: float
    config: MonitorConfig


class CheckIns:
    """Sends a check-in when a task of a recurring schedule begins, and when it has ended."""

    def __init__(self) -> None:
        self._configs: dict[tuple[int, str], tuple[float, MonitorConfig | None]] = {}

    def begin(self, task: DelayTask) -> BegunCheckIn | None:
        """Return the check-in, or None if no schedule has made the task."""
        name = schedule_name(task)
        config = None if name is None else self._config_of(name)
        if name is None or config is None:
            return None
        slug = slug_of(name)
        id = capture_checkin(slug, status="in_progress", monitor_config=config)
        return None if id is None else BegunCheckIn(slug, id, monotonic(), config)

    def end(self, begun: BegunCheckIn, state: str) -> None:
        """Report the end of the run. The check-in of a task that runs again is an error, too."""
        status = "ok" if state in ("SUCCESS", "REVOKED") else "error"
        capture_checkin(
            begun.slug,
            check_in_id=begun.id,
            status=status,
            duration=monotonic() - begun.began,
            monitor_config=begun.config,
        )

    def _config_of(self, name: str) -> MonitorConfig | None:
        delays = getattr(current_app, "delaytasks", None)
        if delays is None:
            return None
        key, now = (id(delays), name), monotonic()
        known = self._configs.get(key)
        if known is not None and now < known[0] + MONITOR_DEFINITION_KEPT_S:
            return known[1]
        try:
            config = config_of(delays.recurring.get(name))
        except DelayTaskError:  # a key of the same form that a caller has chosen
            config = None
        # Threads may come here together, so that another one may have dropped the same definition.
        self._configs.pop(key, None)
        self._configs[key] = now, config
        while len(self._configs) > MAX_MONITOR_DEFINITIONS:
            self._configs.pop(next(iter(self._configs.copy())), None)
        return config


def schedule_name(task: DelayTask) -> str | None:
    """Return the name of the schedule that the key of an occurrence contains."""
    name, at, instant = (task.key or "").rpartition("@")
    try:
        datetime.fromisoformat(instant.removesuffix("Z"))
    except ValueError:
        return None
    return name if at and instant.endswith("Z") else None


def slug_of(name: str) -> str:
    """Return the name in the characters that Sentry allows."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")[:MAX_SLUG] or "schedule"


def config_of(schedule: RecurringSchedule) -> MonitorConfig | None:
    """Return the definition of the monitor, or None if Sentry cannot represent the timing."""
    kind, _, rest = schedule.timing.partition(" ")
    config: MonitorConfig = {"checkin_margin": MARGIN_MINUTES, "timezone": schedule.tz}
    if kind == "every":
        try:
            minutes, seconds = divmod(float(rest), 60)
        except ValueError:  # the timing of another program
            return None
        if seconds or not minutes:
            return None
        config["schedule"] = {"type": "interval", "value": int(minutes), "unit": "minute"}
        return config
    expression = schedule.timing.removeprefix("crontab ")
    if kind == "solar" or len(expression.split()) != 5:
        return None
    config["schedule"] = {"type": "crontab", "value": expression}
    return config
