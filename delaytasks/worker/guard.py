"""Messages that Celery, or its transport, can not take in: anybody who can write to the broker may send them, and they
must not end the worker."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger
from redis.exceptions import DataError

logger = get_logger(__name__)
JSON = "application/json"
#: What reading a message may end in, and sending on what it says: a delivery tag that is a list, for one.
OF_DATA = (LookupError, TypeError, ValueError, DataError)


class GuardStep(bootsteps.StartStopStep):
    """Stands between the broker and Celery's own handling, which ends the worker on what it did not think of (a task
    name that is a list, in Redis text that is no JSON)."""

    label = "Guard"
    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        make = consumer.create_task_handler
        consumer.create_task_handler = lambda *args, **options: self._guarded(consumer, make(*args, **options))

    def start(self, consumer: Any) -> None:
        """For each new connection."""
        transport = consumer.connection.transport
        if transport.driver_type != "redis":
            return
        create = transport.create_channel
        transport.create_channel = lambda *args: _guarded_channel(consumer, create(*args))
        for channel in transport.channels:
            _guarded_channel(consumer, channel)

    @staticmethod
    def _guarded(consumer: Any, handle: Callable[[Any], Any]) -> Callable[[Any], None]:
        passed_on = consumer.connection_errors + consumer.channel_errors

        def on_message(message: Any) -> None:
            desk = consumer.controller.delays_desk
            try:
                if message.content_type != JSON and _is_ours(consumer, desk, message):
                    # Before anything of it is decoded, whatever the app's `accept_content` says.
                    raise ValueError(f"content type {message.content_type!r:.40}")
                handle(message)
            except Exception as error:
                if _is_the_brokers(error, passed_on):
                    raise
                desk.refuse("message", error)
                if not message.acknowledged:
                    message.ack_log_error(logger, (*passed_on, *OF_DATA))

        return on_message


def _is_ours(consumer: Any, desk: Any, message: Any) -> bool:
    """In one of our queues. In Redis the message itself says where it was, so a worker of ours alone believes none."""
    prefix = desk.delays.settings.namespace + "."
    if all(queue.name.startswith(prefix) for queue in consumer.task_consumer.queues):
        return True
    return str((message.delivery_info or {}).get("routing_key")).startswith(prefix)


def _is_the_brokers(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    """Celery takes a message without properties for a lost connection, too."""
    return isinstance(error, OSError) or (isinstance(error, kinds) and not isinstance(error, OF_DATA))


def _guarded_channel(consumer: Any, channel: Any) -> Any:
    """By these handlers it reads queues, and what is said to all. Of the latter several may have come together, and
    nobody would look at those behind one that failed until another one comes."""

    def nothing() -> bool:
        return False

    def has_more() -> bool:
        connection = channel.subclient.connection
        return connection is not None and bool(connection.can_read(timeout=0))

    read: Any
    for name, read in list(channel.handlers.items()):
        if not hasattr(read, "is_guarded"):
            more = has_more if name == "LISTEN" else nothing
            channel.handlers[name] = _guarded_read(consumer, read, more)
    return channel


def _guarded_read(consumer: Any, read: Callable[..., Any], has_more: Callable[[], bool]) -> Callable[..., Any]:
    passed_on = consumer.connection_errors + consumer.channel_errors

    def guarded(*args: Any, **options: Any) -> Any:
        while True:
            try:
                return read(*args, **options)
            except Empty:
                if not has_more():
                    raise
            except Exception as error:
                if _is_the_brokers(error, passed_on):
                    raise
                # It was taken from the list, and is gone.
                consumer.controller.delays_desk.refuse("message", error)
                if not has_more():
                    return None

    guarded.is_guarded = True  # type: ignore[attr-defined]
    return guarded
