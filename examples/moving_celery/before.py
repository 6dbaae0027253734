"""A Celery project as it is today: delays are a countdown, and wait in the memory of a worker."""

from __future__ import annotations

import logging

from celery import Celery

logger = logging.getLogger(__name__)
app = Celery("shop")
app.conf.imports = ["examples.moving_celery.before"]


@app.task(name="shop.remind")
def remind(order: int) -> None:
    logger.info("order %d is not paid yet", order)


def order_placed(order: int, remind_after_s: float) -> str:
    """Return the id of the Celery task."""
    return str(remind.apply_async((order,), countdown=remind_after_s).id)
