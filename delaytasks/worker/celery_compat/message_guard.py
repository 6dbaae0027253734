"""Refuses messages that Celery or its transport cannot handle.

Any client that can write to the broker can send them. They must not end the worker, fill its memory
or fill its log.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.utils.log import get_logger
from kombu.serialization import prepare_accept_content
from kombu.transport import virtual

from delaytasks.worker.celery_compat.broker_errors import DATA_ERRORS, is_broker_error
from delaytasks.worker.celery_compat.versions import keep_polling
from delaytasks.worker.refused_messages import JSON, MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from delaytasks.worker.celery_compat.redis_guard import RedisGuard

logger = get_logger(__name__)
#: The methods that Celery's consumer calls for a message that it does not accept, with the position
#: of the message among their arguments. They log the whole message, and may write to the result
#: backend.
REFUSING_METHODS = {
    "on_unknown_message": 1,
    "on_unknown_task": 1,
    "on_invalid_task": 1,
    "on_decode_error": 0,
}

#: AMQP's type of the frames that have a message's properties.
HEADER_FRAME = 2
#: The length of the part of such a frame before the properties.
HEADER_FRAME_BYTES = 12
#: The names of the queues of remote control end like this.
PIDBOX_SUFFIX = ".celery.pidbox"
#: The encodings that Celery itself writes. Python's codecs include `bz2_codec` and `zlib_codec`.
ENCODINGS = ("utf-8", "binary")

Strip = Callable[[Any, float], str | None]


class GuardStep(bootsteps.Step):
    """Looks at each message before Celery, which ends the worker after some malformed messages.

    Examples are a task name that is a list, and in Redis a text that is not JSON.
    """

    label = "Guard"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        #: The queue of delaytasks from which the current message comes.
        self._queue: str | None = None
        #: The reason why the current message is refused.
        self._reason: str | None = None
        self._redis: RedisGuard | None = None
        conf = consumer.app.conf
        #: The queues from which gossip reads the events of other workers begin like this.
        self._events_prefix = f"{conf.event_queue_prefix}."
        #: The content types of remote control and events, for Celery reads other ones as text.
        self._accepted = prepare_accept_content(
            {*(conf.accept_content or ()), conf.event_serializer, "json"}
        )
        # A step that starts after the connection would be too late: Celery's steps that declare
        # queues may start before it.
        connect = consumer.connect
        consumer.connect = lambda: self._guard_connection(connect())
        make = consumer.create_task_handler
        consumer.create_task_handler = lambda *args, **options: self._guarded(
            make(*args, **options)
        )
        for name, position in REFUSING_METHODS.items():
            setattr(
                consumer, name, partial(self._refuse_for_celery, getattr(consumer, name), position)
            )

    # -- before the transport decodes a message ---------------------------------------------------

    def _guard_connection(self, connection: Any) -> Any:
        transport = connection.transport
        if transport.driver_type == "redis":
            # Imported here: other brokers need no Redis client.
            from delaytasks.worker.celery_compat.redis_guard import RedisGuard

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
        """Deliver a message without its properties if py-amqp cannot read them.

        Examples are a table with 1,000 levels, and a time out of range. Otherwise the worker ends
        or reconnects, RabbitMQ delivers the message again, and each worker ends in turn.
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
                return handle((kind, channel, bytes(content[:HEADER_FRAME_BYTES]) + b"\0\0"))

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
        """Check each message of a queue of delaytasks before kombu makes a `Message` of it.

        kombu decompresses the body for that, without a limit for its size.
        """
        take_in: Callable[..., Any]
        if queue.startswith(self._runtime.settings.namespace + "."):
            take_in = partial(self._take_in, queue)
        elif queue.endswith(PIDBOX_SUFFIX) or queue.startswith(self._events_prefix):
            take_in = self._take_in_control
        else:
            return consume(queue, *args, **options)
        if isinstance(channel, virtual.Channel):
            answer = consume(queue, *args, **options)
            callbacks = channel.connection._callbacks
            callbacks[queue] = partial(take_in, _strip_virtual, callbacks[queue])
            return answer
        callback = partial(take_in, _strip_amqp, options.pop("callback"))
        return consume(queue, *args, callback=callback, **options)

    def _take_in(self, queue: str, strip: Strip, callback: Callable[[Any], Any], raw: Any) -> Any:
        self._queue, self._reason = queue, strip(raw, MAX_MESSAGE_BYTES)
        try:
            return callback(raw)
        finally:
            self._queue = self._reason = None

    def _take_in_control(self, strip: Strip, callback: Callable[[Any], Any], raw: Any) -> Any:
        """Refuse a message of remote control, or an event, that is compressed or of another form.

        Celery never compresses these messages, and they need no acknowledgement.
        """
        reason = strip(raw, math.inf) or self._unreadable(raw)
        if reason is None:
            return callback(raw)
        return self._runtime.refused_messages.refuse("control", ValueError(reason))

    def _unreadable(self, raw: Any) -> str | None:
        """Return why Celery cannot have sent this content."""
        if isinstance(raw, dict):
            kind, encoding = raw.get("content-type"), raw.get("content-encoding")
        else:
            properties = getattr(raw, "properties", {})
            kind, encoding = properties.get("content_type"), properties.get("content_encoding")
        if kind not in list(self._accepted):  # `kind` may be unhashable
            return f"content type {kind!r:.40}"
        if encoding and encoding not in ENCODINGS:
            return f"content encoding {encoding!r:.40}"
        return None

    # -- after the transport has decoded a message ------------------------------------------------

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
                if is_broker_error(error, passed_on):
                    raise
                self._refuse(message, error)

        return on_message

    def _check(self, message: Any) -> None:
        """Raise `ValueError` unless the content is JSON, which `accept_content` may not require."""
        if self._reason is not None:
            raise ValueError(self._reason)
        if message.content_type != JSON:
            raise ValueError(f"content type {message.content_type!r:.40}")
        if message.body is not None and len(message.body) > MAX_MESSAGE_BYTES:
            raise ValueError("too long")
        message.accept = {JSON}

    def _refuse_for_celery(self, original: Callable[..., Any], position: int, *args: Any) -> None:
        """Refuse a message of a queue of delaytasks; Celery handles the other ones itself."""
        message = args[position]
        if not self._is_ours(message):
            original(*args)
            return
        error = next((arg for arg in args if isinstance(arg, Exception)), None)
        reason = self._reason or f"not a message of ours: {type(error).__name__} {error}"
        self._refuse(message, ValueError(reason))

    def _refuse(self, message: Any, error: Exception) -> None:
        self._runtime.refused_messages.refuse("message", error)
        if not message.acknowledged:
            passed_on = self._consumer.connection_errors + self._consumer.channel_errors
            # kombu would log the whole tag.
            logged = tuple(kind for kind in passed_on if not issubclass(kind, DATA_ERRORS))
            try:
                message.ack_log_error(logger, logged)
            except DATA_ERRORS:
                pass  # the tag is malformed, so the broker has recorded nothing under it

    def _is_ours(self, message: Any) -> bool:
        """Return whether the message was in a queue of delaytasks.

        In Redis the name of the queue is a field of the message, which its sender can choose. A
        worker that serves only queues of delaytasks does not read this field.
        """
        prefix = self._runtime.settings.namespace + "."
        if self._queue is not None:
            return True
        tasks = self._consumer.task_consumer
        if tasks is not None and all(queue.name.startswith(prefix) for queue in tasks.queues):
            return True
        return str((message.delivery_info or {}).get("routing_key")).startswith(prefix)


def _strip_virtual(raw: Any, max_bytes: float) -> str | None:
    """Return why a message of kombu's own transports is refused, or None if it is accepted.

    A refused message loses its headers and its body, so that kombu decodes nothing of it.
    """
    if not isinstance(raw, dict):
        return None  # kombu refuses it
    headers, body = raw.get("headers"), raw.get("body")
    size = len(body) if isinstance(body, (str, bytes)) else 0
    # The body may be base64, which is longer by a third.
    reason = _reason_to_refuse(headers, size, max_bytes * 4 / 3 + 4)
    if reason is not None:
        raw["headers"], raw["body"] = {}, ""
    return reason


def _strip_amqp(raw: Any, max_bytes: float) -> str | None:
    """Do the same as `_strip_virtual` for a message of py-amqp."""
    reason = _reason_to_refuse(
        raw.properties.get("application_headers"), len(raw.body or b""), max_bytes
    )
    if reason is not None:
        raw.properties["application_headers"], raw.body = {}, b""
    return reason


def _reason_to_refuse(headers: Any, size: int, max_bytes: float) -> str | None:
    if isinstance(headers, dict) and headers.get("compression"):
        return f"compressed ({headers['compression']!r:.40})"
    return "too long" if size > max_bytes else None
