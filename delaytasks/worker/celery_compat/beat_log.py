"""Logs the sweeps that Celery beat sends, every few seconds, at the level DEBUG."""

from __future__ import annotations

import logging
from typing import Any

from celery import signals

from delaytasks.timers.eta import SWEEP


class SweepsAtDebug(logging.Filter):
    """Changes the level of `Scheduler: Sending due task … (delaytasks.sweep)` to DEBUG.

    `celery.beat.Scheduler.apply_entry` logs this message at INFO. All other records stay as they
    are.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def filter(self, record: logging.LogRecord) -> bool:
        if (
            record.levelno != logging.INFO
            or not isinstance(record.args, tuple)
            or SWEEP not in record.args
        ):
            return True
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return self._logger.isEnabledFor(logging.DEBUG)


def quiet_beat(**_: Any) -> None:
    logger = logging.getLogger("celery.beat")
    if not any(isinstance(known, SweepsAtDebug) for known in logger.filters):
        logger.addFilter(SweepsAtDebug(logger))


def quiet_beats() -> None:
    """Add the filter to a beat process and to a beat inside a worker (`celery worker -B`)."""
    for starting in (signals.beat_init, signals.beat_embedded_init):
        starting.connect(quiet_beat, weak=False, dispatch_uid="delaytasks.quiet_beat")
