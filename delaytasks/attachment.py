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

    celery_app.delaytasks_receivers = receivers = _Receivers(processes)
    # Celery sends these after it has made its handlers; not if the application makes its own.
    signals.after_setup_logger.connect(receivers.format_log)
    signals.after_setup_task_logger.connect(receivers.format_log)
    signals.import_modules.connect(receivers.import_modules, sender=celery_app)


class _Receivers:
    """Receivers of Celery's signals. The signals refer to them weakly, and the app holds them:
    an app that is no longer used is freed with them.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def format_log(self, logger: Any, **_: Any) -> None:
        """Let the handlers of a logger print documents, if the settings say so."""
        settings = self._processes.wiring.settings
        if settings.has_structured_log:
            from delaytasks.core.structured_log import LogFormatter

            log_format: Any = settings.log_format
            for handler in logger.handlers:
                handler.setFormatter(LogFormatter(log_format))

    def import_modules(self, **_: Any) -> None:
        import_entry_points()


def import_entry_points() -> None:
    """Import the processors of installed packages, which name them as entry points."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        point.load()
