"""Publisher confirms of RabbitMQ for many messages at a time.

py-amqp waits for the confirmation of each message before it sends the next one. Here all messages
of a batch are sent first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delaytasks.core.clock import monotonic


class RefusedByBrokerError(Exception):
    """RabbitMQ has no queue for the message, or could not store it."""


class Confirms:
    """The confirmations of one channel, which numbers its messages from 1."""

    def __init__(self, channel: Any) -> None:
        channel.confirm_select()
        channel.events["basic_ack"].add(self._acknowledged)
        channel.events["basic_nack"].add(self._not_acknowledged)
        channel.events["basic_return"].add(self._returned)
        self._last = 0
        #: By the number of an unconfirmed message: its correlation id.
        self._pending: dict[int, Any] = {}
        self._refused: dict[int, Exception] = {}
        #: The reasons of messages that came back, by correlation id.
        self._unroutable: dict[Any, Exception] = {}
        self._is_blocked = False
        amqp = channel.connection
        amqp.on_blocked, amqp.on_unblocked = self._blocked, self._unblocked

    def expect(self, correlation_id: Any) -> int:
        """Return the number of the message that was just published."""
        self._last += 1
        self._pending[self._last] = correlation_id
        return self._last

    def wait(self, connection: Any, until: float) -> None:
        """Wait until each message is confirmed or refused.

        Raises the transport's exception, or `TimeoutError` after `until`.
        """
        while self._pending:
            left_s = until - monotonic()
            if left_s <= 0:
                raise TimeoutError("the broker did not confirm all messages in time")
            connection.drain_events(timeout=left_s)

    def is_blocked(self, connection: Any) -> bool:
        """Return whether RabbitMQ reads no messages from this connection now."""
        if self._is_blocked:
            try:
                connection.drain_events(timeout=0)
            except TimeoutError:
                pass  # the broker has sent nothing
        return self._is_blocked

    def result(self, number: int, unknown: Callable[[str], Exception]) -> Exception | None:
        """Return None if the message is confirmed, or the reason why it is not."""
        if number in self._pending:
            return unknown("the broker did not confirm the message")
        return self._refused.pop(number, None)

    # py-amqp calls these while it reads from the connection.

    def _blocked(self, _reason: str) -> None:
        self._is_blocked = True

    def _unblocked(self) -> None:
        self._is_blocked = False

    def _acknowledged(self, number: int, multiple: bool) -> None:
        for each in self._named(number, multiple):
            reason = self._unroutable.pop(self._pending.pop(each), None)
            if reason is not None:
                self._refused[each] = reason

    def _not_acknowledged(self, number: int, multiple: bool) -> None:
        for each in self._named(number, multiple):
            del self._pending[each]
            self._refused[each] = RefusedByBrokerError("RabbitMQ could not store the message")

    def _returned(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """Note a message without a queue; its confirmation follows."""
        where = f"exchange {exchange!r}, routing key {routing_key!r}"
        self._unroutable[message.properties.get("correlation_id")] = RefusedByBrokerError(
            f"RabbitMQ has no queue for the message ({where}): start a worker that consumes it, or "
            "declare the queue in task_queues"
        )

    def _named(self, number: int, multiple: bool) -> list[int]:
        if not multiple:
            return [number] if number in self._pending else []
        return [each for each in self._pending if each <= number]
