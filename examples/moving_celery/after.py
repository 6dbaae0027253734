"""The same project with delaytasks: one statement more, and no call has changed."""

from __future__ import annotations

from delaytasks import DelayTasks
from examples.moving_celery.before import app, order_placed, remind

delays = DelayTasks(app, durable_eta=True)
__all__ = ["app", "delays", "order_placed", "remind"]
