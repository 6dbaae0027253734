"""Devices send heartbeats. A device that is silent for two seconds is reported as lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from celery import Celery

from delaytasks import DelayTasks, NewTask

SILENCE = "2s"

logger = logging.getLogger(__name__)
app = Celery("devices")
app.conf.imports = ["examples.heartbeats.app"]
delays = DelayTasks(app)


@delays.processor("device.lost")
def report_lost(body: dict[str, str]) -> None:
    logger.warning("device %s is lost", body["device"])


def heartbeats(devices: Iterable[str]) -> None:
    """Extend the timeouts of these devices. The first heartbeat of a device starts its timeout.

    A server calls this every second or so with the devices from which it has heard meanwhile. The
    call updates the rows in a few statements, and sends no message.
    """
    gone = delays.touch(tag="device.lost", key=devices, delay=SILENCE).gone
    delays.schedule_many(
        (NewTask("device.lost", {"device": name}, SILENCE, key=name) for name in map(str, gone)),
        on_conflict="replace",
    )


def disconnect(device: str) -> None:
    """A device that says goodbye is not lost."""
    delays.cancel(tag="device.lost", key=device)
