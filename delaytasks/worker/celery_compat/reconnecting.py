"""A worker that loses its broker finds it again soon after it is back, and works from the table until then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

from delaytasks.core.bounded_calls import in_background
from delaytasks.timers.broker_link import is_home_node_down
from delaytasks.worker.celery_compat.broker_outage import (
    close_meanwhile,
    lose_the_broker_with_heartbeats,
    meanwhile,
    rest,
)
from delaytasks.worker.celery_compat.versions import LONGEST_PAUSE_S, PAUSE_STEP_S, interval_max

logger = get_logger(__name__)

#: Between two tries. kombu's own pauses, which Celery does not set, grow by two seconds each time, to thirty.
PAUSE_S = 4


class ReconnectStep(bootsteps.Step):
    label = "Reconnect"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        consumer.ensure_connected = partial(self._connect, consumer, consumer.ensure_connected)
        self._lacks_queue = False
        blueprint = getattr(consumer, "blueprint", None)
        if blueprint is not None:
            blueprint.start = partial(self._start, consumer, blueprint.start)
            lost = consumer.on_connection_error_after_connected
            consumer.on_connection_error_after_connected = partial(close_meanwhile, consumer, lost)
            lose_the_broker_with_heartbeats(consumer.app)

    def _connect(
        self, consumer: Any, ensure_connected: Callable[[Any], Any], connection: Any
    ) -> Any:
        # The pool has just been made to forget jobs, and turning the event loop may read the result of one of them.
        runtime = getattr(getattr(consumer, "controller", None), "delays_runtime", None)
        if runtime is not None:
            runtime.recall()
        if self._lacks_queue:
            self._lacks_queue = False
            rest(consumer, PAUSE_S)
        return meanwhile(consumer, partial(_look_often, ensure_connected, connection))

    def _start(self, consumer: Any, start: Callable[[Any], None], parent: Any) -> None:
        """Everything that a consumer does, from connecting on."""
        for step in consumer.steps:
            if type(step).__name__ == "DelayedDelivery" and not isinstance(step.start, partial):
                step.start = partial(_set_up_beside, step, step.start)
        try:
            start(parent)
        except consumer.channel_errors as error:
            if not is_home_node_down(error):
                raise
            # Nothing is wrong with the queue, and it comes back with its node. For Celery any error of this kind would
            # be the end of the worker; a lost connection is not.
            self._lacks_queue = True
            raise ConnectionResetError(
                f"{error}; until then this worker works from the table"
            ) from error


def _set_up_beside(step: Any, start: Callable[[Any], None], consumer: Any) -> None:
    """Celery's step for native delayed delivery, which our messages do not need, sets up the broker of each URL, and
    tries for many seconds where nobody answers: not before this worker takes in messages."""
    step._validate_configuration(consumer.app)

    def set_up() -> None:
        try:
            start(consumer)
        except Exception:
            logger.exception("delaytasks: native delayed delivery could not be set up")

    in_background(set_up, "delivery", is_kept=False)


def _look_often(ensure_connected: Callable[[Any], Any], connection: Any) -> Any:
    """For the consumer's connections only: all others have their own patience."""
    ensure = connection.ensure_connection

    def ensure_soon(errback: Any, max_retries: int | None, **options: Any) -> Any:
        return ensure(
            errback,
            max_retries and as_patient(max_retries),
            interval_max=interval_max(PAUSE_S),
            **options,
        )

    connection.ensure_connection = ensure_soon
    return ensure_connected(connection)


def as_patient(retries: int) -> int:
    """How many of our retries last as long as so many of Celery's."""
    lasts_s = sum(min(PAUSE_STEP_S * n, LONGEST_PAUSE_S) for n in range(1, retries + 1))
    return -(-lasts_s // PAUSE_S) + 1  # the first pause is half as long
