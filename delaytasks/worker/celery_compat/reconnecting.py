"""Reconnects a worker soon after its broker is back.

Until then the worker runs rows from the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.utils.log import get_logger
from redis.exceptions import ResponseError

from delaytasks.core.bounded_calls import in_background
from delaytasks.core.clock import monotonic
from delaytasks.timers.broker_link import is_home_node_down
from delaytasks.worker.celery_compat.broker_outage import (
    call_in_background,
    close_in_background,
    fail_on_unsent_events,
    turn_event_loop,
)
from delaytasks.worker.celery_compat.versions import LONGEST_PAUSE_S, PAUSE_STEP_S, interval_max

if TYPE_CHECKING:
    from delaytasks.worker.runtime import WorkerRuntime

logger = get_logger(__name__)

#: The pause between two attempts to connect. Celery leaves the pauses to kombu, which lets them
#: grow by two seconds each time, up to thirty.
RECONNECT_PAUSE_S = 4

#: RabbitMQ's codes for a queue or exchange that a worker cannot use, each with the remedy.
REFUSED_REMEDIES = {
    403: "give the broker's user its rights again, or end the exclusive consumer",
    404: "bring its RabbitMQ node back, or create what is missing",
    405: "delete it while no worker runs: it belongs to one connection only",
    406: (
        "delete it while no worker runs, or correct the setting: it exists with another type or "
        "other arguments"
    ),
}
REDIS_REMEDIES = {
    "WRONGTYPE": "delete or rename the key that does not contain what Celery keeps there",
    "": (
        "check that the broker's user may read and write the keys of its queues, that Redis has "
        "memory, and that it is a primary"
    ),
}
UNTIL_CREATED = "; until then this worker works from the table"
SILENT_REMEDY = (
    "at least one of these queues does not answer: bring the nodes of its majority back "
    "(`rabbitmq-queues quorum_status`), or, if it holds no messages of other tasks, delete it, and "
    "workers create it again"
)
_REFUSED_NAME = re.compile(r"(?:queue|exchange) '([^']*)'")


class ReconnectStep(bootsteps.Step):
    """Replaces the methods of Celery's consumer that start it and that connect to the broker."""

    label = "Reconnect"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        consumer.ensure_connected = partial(self._connect, consumer, consumer.ensure_connected)
        self._lacks_queue = False
        #: Whether the worker has read from its queues since it connected.
        self._is_ready = False
        #: The queue or exchange that RabbitMQ has refused, or the queues of which one is silent.
        self._blocked: str | None = None
        blueprint = getattr(consumer, "blueprint", None)
        if blueprint is not None:
            blueprint.start = partial(self._start, consumer, blueprint.start)
            consumer.on_ready = partial(self._on_ready, consumer, consumer.on_ready)
            lost = consumer.on_connection_error_after_connected
            consumer.on_connection_error_after_connected = partial(self._close, consumer, lost)
            fail_on_unsent_events(consumer.app)

    def _connect(
        self, consumer: Any, ensure_connected: Callable[[Any], Any], connection: Any
    ) -> Any:
        # Celery has just made the pool forget jobs, and the event loop may read the result of one.
        runtime = getattr(getattr(consumer, "controller", None), "delays_runtime", None)
        if runtime is not None:
            runtime.recall()
        if self._lacks_queue:
            self._lacks_queue = False
            turn_event_loop(consumer, RECONNECT_PAUSE_S)
        return call_in_background(consumer, partial(_retry_often, ensure_connected, connection))

    def _start(self, consumer: Any, start: Callable[[Any], None], parent: Any) -> None:
        """Start the consumer's steps, from connecting on."""
        consumer.controller.delays_runtime.service_watch.mark_broker_lost()
        self._is_ready, began = False, monotonic()
        for step in consumer.steps:
            if type(step).__name__ == "DelayedDelivery" and not isinstance(step.start, partial):
                step.start = partial(_set_up_in_background, step, step.start)
        try:
            start(parent)
        except consumer.channel_errors as error:
            if not self._is_refusal(consumer, error):
                raise
            # The queue comes back with its node, or an operator repairs it. Celery ends the worker
            # after an error of this kind, but not after a lost connection.
            self._lacks_queue = True
            raise ConnectionResetError(f"{error}{UNTIL_CREATED}") from error
        except TimeoutError as error:
            # The broker accepts connections, but a quorum queue without a leader does not answer.
            # Without this pause, the next attempt would stop the main thread again at once.
            if not self._is_ready:
                self._lacks_queue = True
                rest_s = RECONNECT_PAUSE_S + 2 * (monotonic() - began)
                self._report(consumer, "", rest_s, error=repr(error), remedy=SILENT_REMEDY)
            raise

    def _close(self, consumer: Any, close: Callable[..., Any], error: BaseException) -> Any:
        """Close the connection that was lost."""
        consumer.controller.delays_runtime.service_watch.mark_broker_lost()
        connection = consumer.connection
        connection.close = partial(_close_or_report, connection.close)
        return close_in_background(consumer, close, error)

    def _is_refusal(self, consumer: Any, error: BaseException) -> bool:
        """Return whether the broker refuses a queue or an exchange, and report which one."""
        if isinstance(error, ResponseError):
            remedy = next(text for word, text in REDIS_REMEDIES.items() if word in str(error))
            self._report(consumer, "", 2 * RECONNECT_PAUSE_S, error=str(error), remedy=remedy)
            return True
        code, name = getattr(error, "reply_code", None), _REFUSED_NAME.search(str(error))
        if code not in REFUSED_REMEDIES or name is None:
            return is_home_node_down(error)
        remedy = REFUSED_REMEDIES[code]
        rest_s = 2 * RECONNECT_PAUSE_S
        self._report(consumer, name[1], rest_s, code=code, error=str(error), remedy=remedy)
        return True

    def _report(
        self, consumer: Any, key: str, rest_s: float, *, remedy: str, **fields: Any
    ) -> None:
        """Report that this worker reads no queue now, because of `key`, and send none messages.

        Without a `key`, it may be any of the worker's queues. The next attempt to read them ends
        within `rest_s` seconds.
        """
        runtime = consumer.controller.delays_runtime
        if not key:
            options = consumer.app.conf.broker_transport_options or {}
            prefix = options.get("global_keyprefix", "")
            names = (runtime.publisher.queue(queue).name for queue in runtime.processes.queues)
            key = ", ".join(prefix + name for name in names)
        self._blocked = key
        runtime.events.emit("queue.blocked", key=key, remedy=remedy + UNTIL_CREATED, **fields)
        for queue in runtime.processes.queues:
            # A sweep that cannot send drain messages drains the queue in its own worker.
            runtime.publisher.rest(queue, rest_s)

    def _on_ready(self, consumer: Any, on_ready: Callable[[], None]) -> None:
        self._is_ready = True
        runtime: WorkerRuntime = consumer.controller.delays_runtime
        runtime.connected()
        blocked, self._blocked = self._blocked, None
        if blocked is not None:
            runtime.events.emit("queue.unblocked", key=blocked)
        on_ready()


def _close_or_report(close: Callable[[], None]) -> None:
    """Close a lost connection; an error must not end the worker.

    Celery 5.7 collects the connection first. If Redis does not answer then, the channel fails here
    with an `AttributeError`, since it no longer knows the server to which it should return messages
    that are not acknowledged. The visibility timeout returns them.
    """
    try:
        close()
    except Exception:
        logger.warning("delaytasks: the lost broker connection could not be closed", exc_info=True)


def _set_up_in_background(step: Any, start: Callable[[Any], None], consumer: Any) -> None:
    """Set up native delayed delivery, which delaytasks does not need, in another thread.

    Celery's step connects to the broker of each URL, and retries for many seconds if a broker does
    not answer. The worker takes in messages meanwhile.
    """
    step._validate_configuration(consumer.app)

    def set_up() -> None:
        try:
            start(consumer)
        except Exception:
            logger.exception("delaytasks: native delayed delivery could not be set up")

    in_background(set_up, "delivery", is_kept=False)


def _retry_often(ensure_connected: Callable[[Any], Any], connection: Any) -> Any:
    """Connect the consumer with pauses of `RECONNECT_PAUSE_S`; other connections keep theirs."""
    ensure = connection.ensure_connection

    def ensure_with_short_pauses(errback: Any, max_retries: int | None, **options: Any) -> Any:
        return ensure(
            errback,
            max_retries and retries_as_long_as(max_retries),
            interval_max=interval_max(RECONNECT_PAUSE_S),
            **options,
        )

    connection.ensure_connection = ensure_with_short_pauses
    return ensure_connected(connection)


def retries_as_long_as(retries: int) -> int:
    """Return how many retries with our pauses last as long as `retries` with kombu's pauses."""
    lasts_s = sum(min(PAUSE_STEP_S * n, LONGEST_PAUSE_S) for n in range(1, retries + 1))
    return -(-lasts_s // RECONNECT_PAUSE_S) + 1  # the first pause is half as long
