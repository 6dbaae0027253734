"""Makes a Celery app serve a `DelayTasks`: tasks, bootsteps, beat's schedule."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from celery import signals

from delaytasks.core.errors import ConfigError
from delaytasks.interception.send_task import intercept
from delaytasks.worker.celery_compat.beat_log import quiet_beats
from delaytasks.worker.celery_compat.celery_version import check_celery
from delaytasks.worker.celery_compat.masked_settings import mask_settings
from delaytasks.worker.celery_tasks import register_tasks

if TYPE_CHECKING:
    from delaytasks.wiring import Wired
    from delaytasks.worker.processes import Processes

ENTRY_POINTS = "delaytasks.processors"


def attach(celery_app: Any, delays: Wired, processes: Processes) -> None:
    """Register the tasks and worker steps of `delays`, a `DelayTasks`, with its Celery app."""
    check_celery()
    if getattr(celery_app, "delaytasks", None) is not None:
        raise ConfigError(
            f"{celery_app!r} has delayed tasks already: one DelayTasks per Celery app"
        )
    celery_app.delaytasks = delays
    register_tasks(celery_app, processes)
    intercept(celery_app, delays)
    quiet_beats()
    mask_settings()
    celery_app.steps["worker"].add("delaytasks.worker.bootsteps:DelaysStep")
    celery_app.steps["consumer"].add("delaytasks.worker.celery_compat.message_guard:GuardStep")
    celery_app.steps["consumer"].add("delaytasks.worker.celery_compat.reconnecting:ReconnectStep")

    def add_to_beat(sender: Any, **_: Any) -> None:
        # Imported here: a process that only registers processors does not need it.
        from delaytasks.beat import add_sweeps

        wiring = processes.wiring
        add_sweeps(sender, wiring.settings, wiring.publisher)

    celery_app.on_after_finalize.connect(add_to_beat, weak=False)
    if celery_app.finalized:  # the signal was sent before
        add_to_beat(celery_app)

    # Celery sends these after it has made its handlers; not if the application makes its own. The
    # signals refer weakly to these receivers, and end with the app.
    signals.after_setup_logger.connect(processes.format_log)
    signals.after_setup_task_logger.connect(processes.format_log)
    signals.import_modules.connect(import_entry_points, sender=celery_app, weak=False)


def import_entry_points(**_: Any) -> None:
    """Import the processors of installed packages, which name them as entry points."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        point.load()
