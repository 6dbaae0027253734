"""A worker's connections to its broker are found again soon after the broker is back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps

from delaytasks.worker.celery_compat import LONGEST_PAUSE_S, PAUSE_STEP_S, interval_max

#: Between two tries. kombu's own pauses, which Celery does not set, grow by two seconds each time, to thirty.
PAUSE_S = 4


class ReconnectStep(bootsteps.Step):
    label = "Reconnect"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        consumer.ensure_connected = partial(_look_often, consumer.ensure_connected)


def _look_often(ensure_connected: Callable[[Any], Any], connection: Any) -> Any:
    """For the consumer's connections only: all others have their own patience."""
    ensure = connection.ensure_connection

    def ensure_soon(errback: Any, max_retries: int | None, **options: Any) -> Any:
        return ensure(errback, max_retries and as_patient(max_retries), interval_max=interval_max(PAUSE_S), **options)

    connection.ensure_connection = ensure_soon
    return ensure_connected(connection)


def as_patient(retries: int) -> int:
    """How many of our retries last as long as so many of Celery's."""
    lasts_s = sum(min(PAUSE_STEP_S * n, LONGEST_PAUSE_S) for n in range(1, retries + 1))
    return -(-lasts_s // PAUSE_S) + 1  # the first pause is half as long
