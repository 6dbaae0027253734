"""The entries of Celery beat's schedule that make it sweep."""

from __future__ import annotations

from typing import Any

from delaytasks.core.errors import ConfigError
from delaytasks.core.settings import Settings
from delaytasks.core.text import shown
from delaytasks.timers.eta import SWEEP
from delaytasks.timers.publisher import Publisher


def add_sweeps(celery_app: Any, settings: Settings, publisher: Publisher) -> None:
    """Complete the sweep entries of the schedule; without any, add one for each sweep partition."""
    schedule = celery_app.conf.beat_schedule
    entries = [entry for entry in schedule.values() if entry.get("task") == SWEEP]
    if not entries:
        for sweep_partition in range(settings.sweep_partitions):
            entry = {"task": SWEEP, "schedule": settings.sweep_s, "args": (sweep_partition,)}
            schedule[f"delaytasks-sweep-{sweep_partition}"] = entry
            entries.append(entry)
    queue = publisher.queue(settings.default_queue)
    # Otherwise Celery would declare a queue of another type by this name.
    celery_app.amqp.queues.add(queue)
    for entry in entries:
        entry["options"] = {
            "queue": queue.name,
            "expires": settings.sweep_s,
            **(entry.get("options") or {}),
        }


def check_sweeps(celery_app: Any, settings: Settings) -> None:
    """Raise `ConfigError` if an entry names a sweep partition that does not exist."""
    count = settings.sweep_partitions
    for name, entry in (celery_app.conf.beat_schedule or {}).items():
        sweep_partition, *_ = entry.get("args") or (0,)
        if entry.get("task") == SWEEP and not settings.has_sweep_partition(sweep_partition):
            raise ConfigError(
                f"beat_schedule[{name!r}] names sweep partition {shown(sweep_partition)}, and "
                f"delaytasks_sweep_partitions = {count}: the sweep partitions are 0 to "
                f"{count - 1}; correct its args, or "
                "leave the entries to delaytasks"
            )
