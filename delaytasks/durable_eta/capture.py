"""A producer that gets the message of a Celery task in place of the broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kombu import compression as kombu_compression
from kombu.entity import Exchange, Queue, maybe_delivery_mode
from kombu.serialization import dumps

from delaytasks.durable_eta.stored_message import StoredMessage, queue_definition

#: Options of `publish` that say how a producer sends. The worker that publishes has its own ways.
_OF_SENDING = (
    "retry",
    "retry_policy",
    "timeout",
    "confirm_timeout",
    "mandatory",
    "immediate",
)


class CapturingProducer:
    """Serializes and compresses what Celery publishes, and calls `store` with the message.

    It connects to no broker. All other attributes are those of `producer`, since a result backend
    may use the channel to declare the queue of its results.
    """

    def __init__(self, app: Any, producer: Any, store: Callable[[StoredMessage], None]) -> None:
        self._app = app
        self._producer = producer
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(
        self,
        body: Any,
        routing_key: str = "",
        delivery_mode: Any = None,
        priority: int | None = 0,
        content_type: str | None = None,
        content_encoding: str | None = None,
        serializer: str | None = None,
        headers: Mapping[str, Any] | None = None,
        compression: str | None = None,
        exchange: Any = None,
        declare: Sequence[Any] | None = None,
        expiration: float | None = None,
        **properties: Any,
    ) -> None:
        """Store the message that `kombu.Producer.publish` would send with these arguments."""
        for name in _OF_SENDING:
            properties.pop(name, None)
        headers = dict(headers or {})
        if content_type is None:
            content_type, content_encoding, body = dumps(
                body, serializer=serializer or self._producer.serializer
            )
        compression = self._producer.compression if compression is None else compression
        if compression:
            body, headers["compression"] = kombu_compression.compress(body, compression)
        name = exchange
        if isinstance(exchange, Exchange):
            name, delivery_mode = exchange.name, delivery_mode or exchange.delivery_mode
        if isinstance(properties.get("reply_to"), Queue):
            properties["reply_to"] = properties["reply_to"].name
        if expiration is not None:
            properties["expiration"] = str(int(expiration * 1000))
        queue = next((each for each in declare or () if isinstance(each, Queue)), None)
        self._store(
            StoredMessage(
                body,
                content_type,
                content_encoding or "binary",
                headers,
                {
                    **properties,
                    "priority": priority,
                    "delivery_mode": maybe_delivery_mode(delivery_mode),
                },
                name or "",
                routing_key,
                None if queue is None else queue_definition(self._app, queue),
            )
        )
