"""Publishes stored messages of Celery tasks, and waits for the broker's confirmations.

py-amqp waits for the confirmation of each message before it sends the next one. Here all messages
of a batch are sent first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.messaging import Producer

from delaytasks.durable_eta.stored_message import StoredMessage, queue_of
from delaytasks.model.clock import monotonic, reset_in_child


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


# -- publisher ------------------------------------------------------------------------------------

# Publishes stored messages, many at a time, and reports which ones the broker has confirmed.


#: The time limit for each step of publishing.
PUBLISH_LIMIT_S = 5.0
#: The exception for each message in its order, or None if the broker has it.
Results = list[Exception | None]


class NotConfirmedError(Exception):
    """The broker was lost, or did not answer in time. It may have the message or not."""


class BrokerBlockedError(Exception):
    """RabbitMQ accepts no messages while it lacks memory or disk space."""


class _PublisherLink:
    """A connection, and the queues that were declared on it."""

    def __init__(self, app: Any, connection: Any, limit_s: float) -> None:
        self._app = app
        self._limit_s = limit_s
        self.connection = connection
        channel = connection.channel()
        self._producer = Producer(channel, auto_declare=False)
        # Other transports answer each message, or each batch, before `publish` returns.
        self._confirms = Confirms(channel) if hasattr(channel, "confirm_select") else None
        self._is_batching = self._confirms is None and hasattr(self._producer, "batch")
        self._declared: set[str] = set()

    def publish(
        self,
        messages: Sequence[StoredMessage],
        numbers: Sequence[int],
        now: datetime,
        results: Results,
    ) -> None:
        """Publish the messages with these numbers, and set each result that is known.

        Raises the transport's exception if the broker or the channel is lost.
        """
        if self._confirms is not None and self._confirms.is_blocked(self.connection):
            raise BrokerBlockedError("RabbitMQ blocks publishers (its alarm for memory or disk)")
        for number in numbers:
            self._declare(messages[number])
        tags: dict[int, int] = {}
        with self._producer.batch() if self._is_batching and len(numbers) > 1 else nullcontext():
            for number in numbers:
                message = messages[number]
                self._send(message, now)
                if self._confirms is not None:
                    tags[number] = self._confirms.expect(message.properties.get("correlation_id"))
        if self._confirms is None:
            for number in numbers:
                results[number] = None
            return
        try:
            self._confirms.wait(self.connection, monotonic() + self._limit_s)
        except TimeoutError as error:
            if self._confirms.is_blocked(self.connection):
                raise BrokerBlockedError("RabbitMQ blocks publishers") from error
            raise
        finally:
            for number, tag in tags.items():
                results[number] = self._confirms.result(tag, NotConfirmedError)

    def close(self) -> None:
        try:
            self.connection.release()
        except Exception:
            pass  # a broken connection

    def _declare(self, message: StoredMessage) -> None:
        name = message.queue if isinstance(message.queue, str) else str(message.queue)
        if message.queue is None or name in self._declared:
            return
        queue = queue_of(self._app, message.queue)
        if queue is not None:
            queue(self._producer.channel).declare()
        self._declared.add(name)

    def _send(self, message: StoredMessage, now: datetime) -> None:
        properties = dict(message.properties)
        priority, expiration = properties.pop("priority", 0), properties.pop("expiration", None)
        self._producer.publish(
            message.body,
            routing_key=message.routing_key,
            exchange=message.exchange,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=dict(message.headers),
            priority=priority,
            expiration=_expiration_s(message.headers.get("expires"), expiration, now),
            # Otherwise the broker drops and confirms a message for which there is no queue.
            mandatory=True,
            retry=False,
            **properties,
        )


def _expiration_s(expires: Any, expiration: Any, now: datetime) -> float | None:
    """Return how long the broker keeps the message.

    Celery lets the broker's limit end at `expires`. A worker discards a message that has expired
    and stores its state, so such a message has no limit.
    """
    if not isinstance(expires, str):
        return None if expiration is None else float(expiration) / 1000
    left_s: float = (maybe_make_aware(maybe_iso8601(expires)) - now).total_seconds()
    return left_s if left_s > 0 else None


class MessagePublisher:
    """Publishes messages. Thread-safe: each process has one connection for each call under way.

    Parameters
    ----------
    app
        The Celery app, which defines the queues.
    connect
        Returns a connection to its broker. Each step on it takes at most `limit_s`.
    limit_s
        The time limit for the confirmation of a call's messages.
    now
        Returns the time.
    refuses_all
        The names of the errors with which a broker refuses every message.
    """

    def __init__(
        self,
        app: Any,
        connect: Callable[[], Any],
        limit_s: float,
        now: Callable[[], datetime],
        refuses_all: Collection[str] = (),
    ) -> None:
        self._app = app
        self._refuses_all = refuses_all
        self._connect = connect
        self._limit_s = limit_s
        self._now = now
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._idle: list[_PublisherLink] = []

    def publish(self, messages: Sequence[StoredMessage]) -> Results:
        """Publish the messages, in their order.

        Returns
        -------
        list
            For each message None if the broker has it, `NotConfirmedError` if the broker is
            unavailable, or the exception with which the broker refused it.
        """
        results: Results = [NotConfirmedError("the broker was not reached")] * len(messages)
        if self._try(messages, range(len(messages)), results) is None:
            return results
        # One message has closed the channel for all others, so the rest is published one by one.
        for number in _left(range(len(messages)), results):
            refusal = self._try(messages, [number], results)
            if refusal is not None:
                results[number] = refusal
            elif isinstance(results[number], NotConfirmedError):
                break  # the broker is unavailable for the others too
        return results

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _try(
        self, messages: Sequence[StoredMessage], numbers: Sequence[int], results: Results
    ) -> Exception | None:
        """Publish messages; return the exception with which the broker refused one of them."""
        while True:
            numbers = _left(numbers, results)
            try:
                try:
                    link, is_new = self._idle.pop(), False
                except IndexError:
                    link, is_new = self._new_link(), True
            except Exception as error:  # each transport has errors of its own
                _set_missing(numbers, results, error)
                return None
            try:
                link.publish(messages, numbers, self._now(), results)
            except BrokerBlockedError as error:
                # Another connection would learn only from its next message that it is blocked.
                self._idle.append(link)
                _set_missing(numbers, results, error)
                return None
            except Exception as error:
                # The channel is closed, or a late answer would be taken for the next message's.
                link.close()
                cause = (type(error).__name__ == "BatchPublishError" and error.__cause__) or error
                if not isinstance(cause, Exception):
                    raise
                if not self._is_outage(cause, link.connection):
                    return cause
                # A connection that was idle may have broken meanwhile.
                if is_new or isinstance(cause, TimeoutError):
                    _set_missing(numbers, results, cause)
                    return None
            else:
                self._idle.append(link)
                return None

    def _new_link(self) -> _PublisherLink:
        connection = self._connect()
        try:
            return _PublisherLink(self._app, connection, self._limit_s)
        except BaseException:
            connection.release()
            raise

    def _is_outage(self, error: Exception, connection: Any) -> bool:
        """Return whether the error concerns all messages, and not one of them."""
        if isinstance(error, OSError) or type(error).__name__ in self._refuses_all:
            return True
        is_answer = isinstance(error, connection.channel_errors)
        return isinstance(error, connection.connection_errors) and not is_answer


def _left(numbers: Sequence[int], results: Results) -> list[int]:
    """Return the messages that the broker may not have."""
    return [number for number in numbers if isinstance(results[number], NotConfirmedError)]


def _set_missing(numbers: Sequence[int], results: Results, error: Exception) -> None:
    """Give the messages without a result the reason why they have none."""
    for number in _left(numbers, results):
        results[number] = NotConfirmedError(f"{type(error).__name__}: {error}")
