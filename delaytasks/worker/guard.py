"""Messages that Celery, or its transport, can not take in: anybody who can write to the broker may send them, and they
must not end the worker."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

logger = get_logger(__name__)
JSON = "application/json"


class GuardStep(bootsteps.StartStopStep):
    """Stands between the broker and Celery's own handling, which ends the worker on what it did not think of (a task
    name that is a list, in Redis text that is no JSON)."""

    label = "Guard"
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        make = consumer.create_task_handler
        consumer.create_task_handler = lambda *args, **options: self._guarded(consumer, make(*args, **options))

    def start(self, consumer: Any) -> None:
        """For each new connection: by these a Redis channel reads queues and what is said to all."""
        for channel in getattr(consumer.connection.transport, "channels", None) or ():
            handlers = getattr(channel, "handlers", {})
            handlers |= {name: _guarded_read(consumer, read) for name, read in handlers.items()}

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
            except passed_on:
                raise
            except Exception as error:
                desk.refuse("message", error)
                if not message.acknowledged:
                    message.ack_log_error(logger, passed_on)

        return on_message


def _is_ours(consumer: Any, desk: Any, message: Any) -> bool:
    """In one of our queues. In Redis the message itself says where it was, so a worker of ours alone believes none."""
    prefix = desk.delays.settings.namespace + "."
    if all(queue.name.startswith(prefix) for queue in consumer.task_consumer.queues):
        return True
    return str((message.delivery_info or {}).get("routing_key")).startswith(prefix)


def _guarded_read(consumer: Any, read: Callable[..., Any]) -> Callable[..., Any]:
    passed_on = (Empty, *consumer.connection_errors, *consumer.channel_errors)

    def guarded(*args: Any, **options: Any) -> Any:
        try:
            return read(*args, **options)
        except passed_on:
            raise
        except Exception as error:  # it was taken from the list, and is gone
            consumer.controller.delays_desk.refuse("message", error)
            return None

    return guarded
