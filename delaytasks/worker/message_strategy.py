"""Receives our messages, and refuses those of another form.

Messages are acknowledged on receipt, since the database is the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from delaytasks.timers.eta import read_message

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

logger = get_logger(__name__)
Handler = Callable[..., None]


def run_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    """Return Celery's handler of messages with entries or drain messages."""
    runtime: WorkerRuntime = consumer.controller.delays_runtime
    prefix = runtime.settings.namespace + "."
    acknowledge = _acknowledger(app, consumer.connection_errors)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **_: Any
    ) -> None:
        acknowledge(message)
        try:
            queue = ((message.delivery_info or {}).get("routing_key") or "").removeprefix(prefix)
            content = read_message(_arguments(message, body), queue)
            is_drain = content.priorities is not None
            is_expired = is_drain and _is_expired(message, runtime.clock.now())
            if is_drain and queue not in runtime.processes.queues:
                raise ValueError(f"a drain message for {queue!r:.100}, which is not served here")
        except Exception as error:  # untrusted input may cause any error
            runtime.events.refuse("run", error)
            return
        if content.entries:
            runtime.dispatcher.receive(content.entries)
        if content.priorities is not None and not is_expired:
            runtime.dispatcher.start_drain(queue, content.priorities)

    return on_message


def sweep_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    """Return Celery's handler of beat's messages, which request a sweep."""
    runtime: WorkerRuntime = consumer.controller.delays_runtime
    acknowledge = _acknowledger(app, consumer.connection_errors)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **_: Any
    ) -> None:
        acknowledge(message)
        try:
            args, settings = _arguments(message, body), runtime.settings
            sweep_partition = args[0] if args else None
            if sweep_partition is not None and not settings.has_sweep_partition(sweep_partition):
                count = settings.sweep_partitions
                raise ValueError(f"sweep partition {sweep_partition!r:.20} of {count}")
        except Exception as error:  # untrusted input may cause any error
            runtime.events.refuse("sweep", error)
            return
        runtime.service_watch.mark_beat()
        runtime.sweep_loop.request(sweep_partition)

    return on_message


def _acknowledger(app: Any, connection_errors: Any) -> Callable[[Any], None]:
    """Return a function that acknowledges a message, unless its queue is consumed without that."""
    unacknowledged = {name for name, queue in app.amqp.queues.items() if queue.no_ack}

    def acknowledge(message: Any) -> None:
        if (message.delivery_info or {}).get("routing_key") not in unacknowledged:
            message.ack_log_error(logger, connection_errors)

    return acknowledge


def _arguments(message: Any, body: Any) -> Any:
    payload = message.payload if body is None else body
    if isinstance(payload, dict):
        return payload["args"]  # protocol 1
    return payload[0]


def _is_expired(message: Any, now: datetime) -> bool:
    expires = message.headers.get("expires")
    return expires is not None and datetime.fromisoformat(expires) < now
