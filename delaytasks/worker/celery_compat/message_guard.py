"""Refuses messages in the queues of delaytasks that are not ours or not well-formed.

Any client that can write to the broker can send them. They run nothing, do not end the worker, and
do not fill its log. Celery's own queues and channels are read as Celery reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger
from kombu.message import Message
from redis.exceptions import DataError

from delaytasks.timers.eta import RUN, SWEEP
from delaytasks.worker.celery_compat.read_ahead import read_ahead
from delaytasks.worker.celery_compat.versions import keep_polling

logger = get_logger(__name__)
#: Longer messages are not ours: 1,000 entries of four 64-bit numbers fit.
MAX_MESSAGE_BYTES = 256 * 1024
#: The only content type that is decoded.
JSON = "application/json"
#: Errors from reading a malformed message or using its fields, such as a list as delivery tag.
DATA_ERRORS = (LookupError, TypeError, ValueError, DataError)


class GuardStep(bootsteps.Step):
    """Wraps the function with which Celery's consumer handles each message."""

    label = "Guard"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        make, connect = consumer.create_task_handler, consumer.connect
        consumer.create_task_handler = lambda *args, **options: self._guarded(
            make(*args, **options)
        )
        consumer.connect = lambda: self._connected(connect())

    def _connected(self, connection: Any) -> Any:
        if connection.transport.driver_type == "redis":
            prefix = self._runtime.settings.namespace + "."
            keep_polling(connection.transport, self._consumer.hub)
            read_ahead(connection.default_channel, prefix, self._guarded)
        return connection

    @property
    def _runtime(self) -> Any:
        return self._consumer.controller.delays_runtime

    def _guarded(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return `handle` as a function that raises only errors of the broker.

        Its argument is a message, if the message has been decoded. Otherwise the function decodes
        a message, which Redis has already removed from its list.
        """
        consumer = self._consumer
        kinds = consumer.connection_errors + consumer.channel_errors

        def handle_or_refuse(*args: Any, **options: Any) -> Any:
            messages = [each for each in args if isinstance(each, Message)]
            try:
                for message in messages:
                    self._check(message)
                return handle(*args, **options)
            except Empty:
                raise
            except Exception as error:
                # Celery counts a `KeyError` from a malformed message among the connection errors.
                if isinstance(error, OSError) or (
                    isinstance(error, kinds) and not isinstance(error, DATA_ERRORS)
                ):
                    raise
                self._runtime.events.refuse("message", error)
                for message in messages:
                    self._acknowledge(message)
            return None

        return handle_or_refuse

    def _acknowledge(self, message: Any) -> None:
        try:
            if not message.acknowledged:
                message.ack_log_error(logger, self._consumer.connection_errors)
        except DATA_ERRORS:
            pass  # the delivery tag is malformed, so the broker has recorded nothing under it

    def _check(self, message: Any) -> None:
        """Raise an error unless the message may be ours, or is Celery's own.

        Only JSON is decoded in our queues, whatever the app's `accept_content` says.
        """
        headers = message.headers
        if not self._is_in_our_queue(message) and headers.get("task") not in (RUN, SWEEP):
            return
        if message.content_type != JSON:
            raise ValueError(f"content type {message.content_type!r:.40}")
        if message.body is not None and len(message.body) > MAX_MESSAGE_BYTES:
            raise ValueError("too long")
        message.accept = {JSON}
        # Celery would log a message without a known task as a whole.
        name = headers["task"] if "task" in headers else message.payload["task"]
        if name not in self._consumer.strategies:
            raise ValueError(f"task {name!r:.40}")

    def _is_in_our_queue(self, message: Any) -> bool:
        """Return whether the message was in a queue of delaytasks.

        In Redis the name of the queue is a field of the message, which its sender can choose. A
        worker that serves only queues of delaytasks does not read this field.
        """
        prefix = self._runtime.settings.namespace + "."
        tasks = self._consumer.task_consumer
        if tasks is not None and all(queue.name.startswith(prefix) for queue in tasks.queues):
            return True
        return str((message.delivery_info or {}).get("routing_key")).startswith(prefix)
