"""Callbacks to queues: a task of the tag `delaytasks.message` sends a message to a queue or an
exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kombu.messaging import Producer

from delaytasks.model.celery_calls import Message
from delaytasks.model.clock import reset_in_child
from delaytasks.model.outcomes import Done, Fail, Outcome
from delaytasks.model.task import DelayedTask


class _Link(NamedTuple):
    connection: Any
    producer: Producer

    def close(self) -> None:
        try:
            self.connection.release()
        except Exception:
            pass  # a broken connection


class QueueMessages:
    """Sends messages. Thread-safe: each process has one connection for each message under way.

    `connect` opens a connection. If the broker supports it, each publish on it waits for a
    confirmation.
    """

    def __init__(self, connect: Callable[[], Any], confirm_s: float) -> None:
        self._connect = connect
        self._confirm_s = confirm_s
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._idle: list[_Link] = []

    def content(
        self, to: str, body: Any, exchange: str, headers: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the body of a message's task, after checking it."""
        Message(to, body, exchange, headers or {})
        more = {"exchange": exchange, "headers": dict(headers or {})}
        return {"to": to, "body": body, **{name: value for name, value in more.items() if value}}

    def __call__(self, message: Message, task: DelayedTask) -> Outcome:
        """Send `message`.

        Raises the transport's exception if the broker refuses the message, does not confirm it, or
        has no queue for it.
        """
        while True:
            link, is_new = self._link()
            try:
                outcome = self._publish(link, message, task)
            except Exception as error:
                # A late answer would otherwise be taken for the answer to the next message.
                link.close()
                # A connection that was idle may have broken meanwhile, so a new one tries again.
                is_broken = isinstance(error, link.connection.connection_errors) and not isinstance(
                    error, TimeoutError
                )
                if is_new or not is_broken:
                    raise
            else:
                self._idle.append(link)
                return outcome

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _link(self) -> tuple[_Link, bool]:
        """Return a connection, and whether it is new."""
        try:
            return self._idle.pop(), False
        except IndexError:
            connection = self._connect()
            return _Link(connection, Producer(connection.channel(), auto_declare=False)), True

    def _publish(self, link: _Link, message: Message, task: DelayedTask) -> Outcome:
        transport = link.connection.transport
        if message.exchange and transport.driver_type != "amqp":
            return Fail(
                f"{transport.driver_name} has no exchanges: on it a message goes to a queue"
            )
        link.producer.publish(
            json.dumps(message.body, separators=(",", ":")),
            exchange=message.exchange,
            routing_key=message.to,
            headers=dict(message.headers),
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=2,
            message_id=str(task.id),
            # Otherwise the broker drops and confirms a message for which there is no queue.
            mandatory=True,
            confirm_timeout=self._confirm_s,
            retry=False,
        )
        return Done()
