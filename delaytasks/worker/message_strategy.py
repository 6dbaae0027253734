"""Takes in our messages: acknowledged on receipt, since the row is the truth, and handed to what holds them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from celery.utils.log import get_logger

from delaytasks.timers.eta import read_message

logger = get_logger(__name__)
Handler = Callable[..., None]
#: Longer ones are not ours: 1,000 entries of four 64-bit numbers fit.
MOST_BYTES = 256 * 1024
#: The only content that is decoded.
JSON = "application/json"


def run_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    runtime = consumer.controller.delays_runtime
    runtime.connected()
    prefix = runtime.delays.settings.namespace + "."
    acknowledge = _acknowledger(app, consumer.connection_errors)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **_: Any
    ) -> None:
        acknowledge(message)
        try:
            queue = ((message.delivery_info or {}).get("routing_key") or "").removeprefix(prefix)
            asked = read_message(_arguments(message, body), queue)
            is_over = asked.priorities is not None and _is_expired(message, runtime)
            if asked.priorities is not None and queue not in runtime.delays.processes.queues:
                raise ValueError(f"a drain token for {queue!r:.100}, which is not served here")
        except (
            Exception
        ) as error:  # whatever may come of strangers' data: what is done with it comes after
            runtime.refuse("run", error)
            return
        if asked.entries:
            runtime.hold(asked.entries)
        if asked.priorities is not None and not is_over:
            runtime.dispatcher.drain(queue, asked.priorities, asked.shard)

    return on_message


def sweep_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    runtime = consumer.controller.delays_runtime
    acknowledge = _acknowledger(app, consumer.connection_errors)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **_: Any
    ) -> None:
        acknowledge(message)
        try:
            args = _arguments(message, body)
            house = args[0] if args else None
            if house is not None and not runtime.delays.settings.has_house(house):
                raise ValueError(f"house {house!r:.20} of {runtime.delays.settings.houses}")
        except (
            Exception
        ) as error:  # whatever may come of strangers' data: what is done with it comes after
            runtime.refuse("sweep", error)
            return
        runtime.sweep(house)

    return on_message


def _acknowledger(app: Any, connection_errors: Any) -> Callable[[Any], None]:
    """Messages of queues that are consumed without acknowledgement have none."""
    unacknowledged = {name for name, queue in app.amqp.queues.items() if queue.no_ack}

    def acknowledge(message: Any) -> None:
        if (message.delivery_info or {}).get("routing_key") not in unacknowledged:
            message.ack_log_error(logger, connection_errors)

    return acknowledge


def _arguments(message: Any, body: Any) -> Any:
    if message.content_type != JSON:
        raise ValueError(f"content type {message.content_type!r:.40}")
    if len(message.body) > MOST_BYTES:
        raise ValueError("too long")
    message.accept = {JSON}  # whatever the app accepts
    payload = message.payload if body is None else body
    if isinstance(payload, dict):
        return payload["args"]  # protocol 1
    return payload[0]


def _is_expired(message: Any, runtime: Any) -> bool:
    expires = message.headers.get("expires")
    return expires is not None and datetime.fromisoformat(expires) < runtime.delays.clock.now()
