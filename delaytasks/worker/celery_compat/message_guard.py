"""Messages that Celery, or its transport, can not take in: anybody who can write to the broker may send them, and they
must not end the worker, fill its memory or fill its log."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger
from kombu.transport import virtual

from delaytasks.worker.celery_compat.broker_errors import OF_DATA, is_the_brokers
from delaytasks.worker.celery_compat.redis_guard import RedisGuard
from delaytasks.worker.celery_compat.versions import keep_polling
from delaytasks.worker.message_strategy import JSON, MAX_MESSAGE_BYTES

logger = get_logger(__name__)
#: What Celery calls for messages that it does not accept, and which argument of each call is the message. Each of them
#: logs the whole message, and may write to the result backend.
CELERYS_REFUSALS = {
    "on_unknown_message": 1,
    "on_unknown_task": 1,
    "on_invalid_task": 1,
    "on_decode_error": 0,
}

#: AMQP: the type of a frame that has a message's properties, and the length of what comes before them.
HEADER_FRAME, FIXED_HEADER = 2, 12
#: How the names of remote control's queues end.
PIDBOX = ".celery.pidbox"

Defuse = Callable[[Any, float], str | None]


class GuardStep(bootsteps.Step):
    """Stands between the broker and Celery's own handling, which ends the worker on what it did not think of (a task
    name that is a list, in Redis text that is no JSON)."""

    label = "Guard"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        #: The queue from which the message comes that is being taken in, and why it is refused.
        self._queue: str | None = None
        self._reason: str | None = None
        self._redis: RedisGuard | None = None
        # Not as a step that starts after the connection: Celery's own, which declare queues, may start before it.
        connect = consumer.connect
        consumer.connect = lambda: self._guard_connection(connect())
        make = consumer.create_task_handler
        consumer.create_task_handler = lambda *args, **options: self._guarded(
            make(*args, **options)
        )
        for name, position in CELERYS_REFUSALS.items():
            setattr(
                consumer, name, partial(self._refuse_for_celery, getattr(consumer, name), position)
            )

    # -- before the transport decodes a message ---------------------------------------------------

    def _guard_connection(self, connection: Any) -> Any:
        transport = connection.transport
        if transport.driver_type == "redis":
            self._redis = RedisGuard(self._consumer)
            keep_polling(transport, self._consumer.hub)
        else:
            self._redis = None
        if transport.driver_type == "amqp":
            self._guard_frames(connection.connection)
        create = transport.create_channel
        transport.create_channel = lambda *args: self._guard_channel(create(*args))
        self._guard_channel(connection.default_channel)
        return connection

    def _guard_frames(self, amqp: Any) -> None:
        """Deliver a message without properties if py-amqp cannot read them (a table of 1,000 levels, a strange time).

        Otherwise the worker ends or reconnects, RabbitMQ delivers the message again, and every worker ends likewise.
        """
        handle = getattr(amqp, "on_inbound_frame", None)
        if handle is None:
            return  # another client than py-amqp

        def careful(frame: tuple[int, int, Any]) -> Any:
            try:
                return handle(frame)
            except Exception as error:
                kind, channel, content = frame
                if kind != HEADER_FRAME:
                    raise
                self._runtime.refused_messages.refuse(
                    "message", ValueError(f"unreadable properties: {type(error).__name__}")
                )
                return handle((kind, channel, bytes(content[:FIXED_HEADER]) + b"\0\0"))

        amqp.on_inbound_frame = careful

    def _guard_channel(self, channel: Any) -> Any:
        if not hasattr(channel, "is_guarded"):
            channel.is_guarded = True
            channel.basic_consume = partial(self._consume, channel, channel.basic_consume)
            if self._redis is not None:
                self._redis.guard(channel)
        return channel

    def _consume(
        self, channel: Any, consume: Callable[..., Any], queue: str, *args: Any, **options: Any
    ) -> Any:
        """Look at each message of one of our queues while it is raw: making kombu's own message of it decompresses its
        body, however large the body becomes."""
        take_in: Callable[..., Any]
        if queue.startswith(self._runtime.settings.namespace + "."):
            take_in = partial(self._take_in, queue)
        elif queue.endswith(PIDBOX):
            take_in = self._take_in_control
        else:
            return consume(queue, *args, **options)
        if isinstance(channel, virtual.Channel):
            answer = consume(queue, *args, **options)
            callbacks = channel.connection._callbacks
            callbacks[queue] = partial(take_in, _defuse_virtual, callbacks[queue])
            return answer
        callback = partial(take_in, _defuse_amqp, options.pop("callback"))
        return consume(queue, *args, callback=callback, **options)

    def _take_in(self, queue: str, defuse: Defuse, callback: Callable[[Any], Any], raw: Any) -> Any:
        self._queue, self._reason = queue, defuse(raw, MAX_MESSAGE_BYTES)
        try:
            return callback(raw)
        finally:
            self._queue = self._reason = None

    def _take_in_control(self, defuse: Defuse, callback: Callable[[Any], Any], raw: Any) -> Any:
        """Remote control never compresses what it sends, and its messages need no acknowledgement."""
        reason = defuse(raw, math.inf)
        if reason is None:
            return callback(raw)
        return self._runtime.refused_messages.refuse("control", ValueError(reason))

    # -- after it ---------------------------------------------------------------------------------

    @property
    def _runtime(self) -> Any:
        return self._consumer.controller.delays_runtime

    def _guarded(self, handle: Callable[[Any], Any]) -> Callable[[Any], None]:
        consumer = self._consumer
        passed_on = consumer.connection_errors + consumer.channel_errors

        def on_message(message: Any) -> None:
            try:
                if self._is_ours(message):
                    self._check(message)
                handle(message)
            except Exception as error:
                if is_the_brokers(error, passed_on):
                    raise
                self._refuse(message, error)

        return on_message

    def _check(self, message: Any) -> None:
        """Before anything of it is decoded, whatever the app's `accept_content` says: our messages are JSON."""
        if self._reason is not None:
            raise ValueError(self._reason)
        if message.content_type != JSON:
            raise ValueError(f"content type {message.content_type!r:.40}")
        if message.body is not None and len(message.body) > MAX_MESSAGE_BYTES:
            raise ValueError("too long")
        message.accept = {JSON}

    def _refuse_for_celery(
        self, celerys_own: Callable[..., Any], position: int, *args: Any
    ) -> None:
        """In place of what Celery does with a message that it does not accept, for messages of our queues."""
        message = args[position]
        if not self._is_ours(message):
            celerys_own(*args)
            return
        error = next((arg for arg in args if isinstance(arg, Exception)), None)
        reason = self._reason or f"not a message of ours: {type(error).__name__} {error}"
        self._refuse(message, ValueError(reason))

    def _refuse(self, message: Any, error: Exception) -> None:
        self._runtime.refused_messages.refuse("message", error)
        if not message.acknowledged:
            passed_on = self._consumer.connection_errors + self._consumer.channel_errors
            message.ack_log_error(logger, (*passed_on, *OF_DATA))

    def _is_ours(self, message: Any) -> bool:
        """Whether it was in one of our queues. In Redis the message itself says where it was, so a worker that serves
        our queues alone does not ask it."""
        prefix = self._runtime.settings.namespace + "."
        if self._queue is not None:
            return True
        tasks = self._consumer.task_consumer
        if tasks is not None and all(queue.name.startswith(prefix) for queue in tasks.queues):
            return True
        return str((message.delivery_info or {}).get("routing_key")).startswith(prefix)


def _defuse_virtual(raw: Any, most: float) -> str | None:
    """Why this message is refused, if it is: then nothing is left of it that kombu would decode. `raw` is what kombu's
    own transports read from a broker."""
    if not isinstance(raw, dict):
        return None  # kombu does not take it for a message
    headers, body = raw.get("headers"), raw.get("body")
    size = len(body) if isinstance(body, (str, bytes)) else 0
    reason = _why_not(headers, size, most * 4 / 3 + 4)  # it may be base64
    if reason is not None:
        raw["headers"], raw["body"] = {}, ""
    return reason


def _defuse_amqp(raw: Any, most: float) -> str | None:
    """The same for a message of py-amqp."""
    reason = _why_not(raw.properties.get("application_headers"), len(raw.body or b""), most)
    if reason is not None:
        raw.properties["application_headers"], raw.body = {}, b""
    return reason


def _why_not(headers: Any, size: int, most: float) -> str | None:
    if isinstance(headers, dict) and headers.get("compression"):
        return f"compressed ({headers['compression']!r:.40})"
    return "too long" if size > most else None
