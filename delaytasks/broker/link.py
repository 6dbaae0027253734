"""The link to a broker: messages are published over one connection, and each step has a time limit.

`BrokerLink.publish` sends many messages together, and returns for each of them whether the broker
has it. py-amqp waits for the confirmation of each message before it sends the next one; here all
messages of a call are sent first.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from amqp.exceptions import FrameSyntaxError, MessageNacked
from amqp.serialization import dumps
from billiard.exceptions import SoftTimeLimitExceeded
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer

from delaytasks.model.clock import fork_safe, monotonic

#: The names of the errors with which Redis refuses each write: it is full, or not a primary.
REFUSES_ALL_WRITES = {"OutOfMemoryError", "ReadOnlyError", "MasterDownError"}
#: The limit for each step of connecting. A healthy server may be far away, and the process may be
#: busy with imports.
CONNECT_STEP_S = 2.0


def bounded_connection(
    app: Any, limit_s: float, url: str = "", connect_step_s: float | None = None, **more: Any
) -> Any:
    """Return an open connection on which a step of sending takes at most `limit_s`.

    Parameters
    ----------
    app
        The Celery app. Without `url`, the connection goes to its broker, with its options.
    limit_s
        The time limit for each step of sending.
    url
        The broker, if it is not the app's one.
    connect_step_s
        The time limit for each step of connecting, by default `limit_s`.
    more
        More options of the transport.
    """
    step_s = limit_s if connect_step_s is None else connect_step_s
    make = functools.partial(Connection, url) if url else app.connection_for_write
    options = (not url and app.conf.broker_transport_options) or {}
    is_confirmed = {**options, **more}.get("confirm_publish")
    bounds = {
        "redis": {"socket_timeout": limit_s, "socket_connect_timeout": step_s},
        # Sending reads only if each message is confirmed. Declaring a queue reads too.
        "amqp": {"read_timeout": limit_s if is_confirmed else step_s, "write_timeout": limit_s},
    }.get(make(connect_timeout=step_s).transport.driver_type, {})
    connection = make(connect_timeout=step_s, transport_options={**options, **bounds, **more})
    # `default_channel` would retry forever, and `connect` pauses for 2 s between its two attempts.
    # Here each of several URLs is tried once.
    urls = max(len(connection.alt or ()), 1)
    connection.ensure_connection(
        max_retries=urls - 1, interval_start=0, interval_step=0, timeout=step_s * urls
    )
    return connection


def is_home_node_down(error: BaseException | str) -> bool:
    """Return whether RabbitMQ's error is that a classic queue is on a node of its cluster that is
    down.

    The queue is available again when the node is.
    """
    return "NOT_FOUND" in str(error) and "home node" in str(error)


def broker_error(app: Any, limit_s: float) -> str | None:
    """Return the error of the broker; None if it answers."""
    try:
        bounded_connection(app, limit_s).release()
    except Exception as reason:  # each transport has its own errors, and all mean the same
        return f"{type(reason).__name__}: {reason}"
    return None


class OutageError(Exception):
    """The broker was lost, or did not answer in time. It may have the message or not."""


class BlockedError(OutageError):
    """RabbitMQ accepts no messages while it lacks memory or disk space."""

    def __init__(self) -> None:
        super().__init__("the broker blocks publishers (its alarm for memory or disk)")


class QueueAwayError(OutageError):
    """Only the queue of the message is not available, because its node is down."""


class UnroutableError(Exception):
    """RabbitMQ has no queue for the message."""


class Outgoing(NamedTuple):
    """A message: the arguments of kombu's `Producer.publish`."""

    body: Any
    options: Mapping[str, Any]
    #: The declaration on a connection before its first message of this kind.
    declares: Queue | Exchange | None = None


#: The exception for each message in its order, or None if the broker has it.
Results = list[Exception | None]
#: The results that are known, by the number of the message.
Known = dict[int, Exception | None]
#: What kombu and py-amqp raise for a message that they cannot write, before they write a part.
UNWRITABLE = (ValueError, TypeError, struct.error, FrameSyntaxError)
#: The largest frame of RabbitMQ unless it is configured, and the part of a frame that is left for
#: other properties than the headers.
FRAME_BYTES, _RESERVED_BYTES = 131_072, 4096


def check_headers(headers: Mapping[str, Any], frame_bytes: int = FRAME_BYTES) -> None:
    """Raise `ValueError` if the headers of a message do not fit into one frame of AMQP.

    RabbitMQ closes the connection then, on which other messages are not confirmed yet.
    """
    most = frame_bytes - _RESERVED_BYTES
    if (size := len(dumps("F", [headers]))) > most:
        raise ValueError(f"the headers have {size:,} bytes, and RabbitMQ takes at most {most:,}")


class BrokerLink:
    """A connection that is opened by its first use, and used by one thread at a time.

    Parameters
    ----------
    app
        The Celery app. Without `url`, the connection goes to its broker.
    limit_s
        The time limit for each step of sending, and for all confirmations of one attempt.
    url
        The broker, if it is not the app's one.
    confirms
        Whether RabbitMQ confirms each message. Other transports answer each message, or each batch.
    connect_step_s
        The time limit for each step of connecting.
    """

    def __init__(
        self,
        app: Any,
        limit_s: float,
        url: str = "",
        *,
        confirms: bool = False,
        connect_step_s: float = CONNECT_STEP_S,
    ) -> None:
        self._app = app
        self._limit_s = limit_s
        self._url = url
        self._confirms = confirms
        self._connect_step_s = connect_step_s
        fork_safe(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._connection: Any = None
        self._forget()

    def _forget(self) -> None:
        self._producer: Any = None
        self._confirmations: Confirmations | None = None
        self._declared: set[str] = set()
        self._is_blocked = False

    def publish(self, messages: Sequence[Outgoing]) -> Results:
        """Publish the messages in their order, except those that are sent again. Without messages,
        only connect.

        Returns
        -------
        list
            For each message None if the broker has it, `OutageError` if the broker is unavailable,
            or the exception with which the broker refused it.

        Raises
        ------
        OutageError
            Without messages, if the broker is unavailable.
        """
        known: Known = {}
        with self._lock:
            try:
                self._publish(messages, known)
            except OutageError as error:
                if not messages:
                    raise
                known = {**dict.fromkeys(range(len(messages)), error), **known}
        return [known[number] for number in range(len(messages))]

    def close(self) -> None:
        """Close the connection, unless a thread is using it."""
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    # -- one call, whose thread has the lock ------------------------------------------------------

    def _publish(self, messages: Sequence[Outgoing], known: Known) -> None:
        """Set the result of each message, or raise `OutageError` if others are not known."""
        is_single, declared_before = False, set(self._declared)
        while True:
            declared_before &= self._declared
            left = [number for number in range(len(messages)) if number not in known]
            numbers = left[:1] if is_single else left
            is_used, queue = self._producer is not None, None
            try:
                self._connect()
                for queue in [messages[number].declares for number in numbers]:
                    self._declare(queue)
                queue = None
                self._send(messages, numbers, known)
                self._forget_lost_queues(messages, known, declared_before)
            except BlockedError:
                # Another connection would learn only from its next message that it is blocked.
                raise
            except BaseException as error:
                refusal = self._refusal(error, is_used)
                if queue is not None and refusal is not None:
                    if is_home_node_down(refusal):
                        refusal = QueueAwayError(str(refusal))
                    refused = [number for number in left if messages[number].declares == queue]
                    known.update(dict.fromkeys(refused, refusal))
                elif refusal is not None and len(numbers) == 1:
                    known[numbers[0]] = refusal
                elif refusal is not None:
                    # One message has closed the channel for all others, so the rest goes one by
                    # one.
                    is_single = True
            if len(known) == len(messages):
                return

    def _refusal(self, error: BaseException, is_used: bool) -> Exception | None:
        """Return the broker's answer to a message, or None if a new connection may be better.

        Raises `OutageError` if the broker is unavailable.
        """
        # Redis's answer to a batch, or the error of the connection.
        cause = (type(error).__name__ == "BatchPublishError" and error.__cause__) or error
        is_outage = self._is_outage(cause)
        # The channel is closed, or a late answer would be taken for the next message's.
        self._close()
        # A time limit of the caller says nothing about the broker.
        if not isinstance(cause, Exception) or isinstance(cause, SoftTimeLimitExceeded):
            raise error
        if not is_outage:
            return cause
        # A connection that was idle may have broken meanwhile. A broker that answers late may have
        # the messages.
        if is_used and not (self._confirms and isinstance(cause, TimeoutError)):
            return None
        raise OutageError(f"{type(cause).__name__}: {cause}") from error

    def _connect(self) -> None:
        if self._producer is not None:
            return
        # Many messages are confirmed together.
        options = {"read_timeout": self._limit_s, "confirm_publish": False}
        self._connection = bounded_connection(
            self._app,
            self._limit_s,
            self._url,
            self._connect_step_s,
            **(options if self._confirms else {}),
        )
        channel = self._connection.channel()
        if self._connection.transport.driver_type == "amqp":
            amqp = self._connection.connection
            amqp.on_blocked, amqp.on_unblocked = self._blocked, self._unblocked
            if self._confirms:
                self._confirmations = Confirmations(channel)
        self._producer = Producer(channel, auto_declare=False)

    def _declare(self, queue: Queue | Exchange | None) -> None:
        if queue is not None and queue.name not in self._declared:
            queue(self._producer.channel).declare()
            self._declared.add(queue.name)

    def _send(self, messages: Sequence[Outgoing], numbers: Sequence[int], known: Known) -> None:
        self._raise_if_blocked()
        # kombu has batches since 5.7. For one message a batch only costs time.
        is_batch = len(numbers) > 1 and hasattr(self._producer, "batch")
        with self._producer.batch() if is_batch else nullcontext():
            for number in numbers:
                try:
                    self._send_one(messages[number])
                except UNWRITABLE as error:
                    known[number] = error
                else:
                    if self._confirmations is not None:
                        self._confirmations.expect(number, messages[number], known)
        if self._confirmations is None:
            if self._is_blocked:  # since this call began: the messages are still in the socket
                raise BlockedError
            known.update((number, None) for number in numbers if number not in known)
            return
        try:
            self._confirmations.wait(self._connection, self._limit_s)
        except TimeoutError:
            self._raise_if_blocked()
            raise

    def _forget_lost_queues(
        self, messages: Sequence[Outgoing], known: Known, declared_before: Collection[str]
    ) -> None:
        """Forget the results of messages that RabbitMQ did not store in a queue declared before
        this call, so that the queue is declared again, and the messages are sent again.

        The queue was deleted, or its node is down, which its next declaration shows. At the moment
        when the node dies, RabbitMQ refuses the messages; later, it returns them. A queue that is
        full refuses them a second time.
        """
        for number, result in list(known.items()):
            queue = messages[number].declares
            is_lost = isinstance(result, (UnroutableError, MessageNacked))
            if is_lost and queue is not None and queue.name in declared_before:
                self._declared.discard(queue.name)
                del known[number]

    def _send_one(self, message: Outgoing) -> None:
        options = message.options
        if self._confirmations is not None:
            check_headers(options["headers"], self._connection.connection.frame_max)
        self._producer.publish(message.body, retry=False, **options)

    def _is_outage(self, error: BaseException) -> bool:
        """Return whether the error concerns all messages, and not one of them."""
        if self._producer is None or isinstance(error, OSError):
            return True
        is_answer = isinstance(error, self._connection.channel_errors)
        is_lost = isinstance(error, self._connection.connection_errors) and not is_answer
        return is_lost or type(error).__name__ in REFUSES_ALL_WRITES

    def _raise_if_blocked(self) -> None:
        if self._is_blocked:
            try:
                self._connection.drain_events(timeout=0)
            except TimeoutError:
                pass  # the broker has sent nothing
            if self._is_blocked:
                raise BlockedError

    def _blocked(self, _reason: str) -> None:
        self._is_blocked = True

    def _unblocked(self) -> None:
        self._is_blocked = False

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        self._forget()
        if connection is not None:
            try:
                connection.release()
            except Exception:
                pass  # a broken connection


class ConfirmingLinks:
    """A link for each call under way. A call waits for its confirmations, and no other call does.

    The parameters are those of `BrokerLink`.
    """

    def __init__(self, app: Any, limit_s: float, url: str = "") -> None:
        self._make = functools.partial(
            BrokerLink, app, limit_s, url, confirms=True, connect_step_s=limit_s
        )
        fork_safe(self)

    def after_fork(self) -> None:
        self._idle: list[BrokerLink] = []

    def publish(self, messages: Sequence[Outgoing]) -> Results:
        try:
            link = self._idle.pop()
        except IndexError:
            link = self._make()
        try:
            return link.publish(messages)
        finally:
            self._idle.append(link)

    def close(self) -> None:
        for link in self._idle:
            link.close()


class Confirmations:
    """The confirmations of one channel, which numbers its messages from 1."""

    def __init__(self, channel: Any) -> None:
        channel.confirm_select()
        channel.events["basic_ack"].add(self._acknowledged)
        channel.events["basic_nack"].add(self._not_acknowledged)
        channel.events["basic_return"].add(self._returned)
        self._last = 0
        #: By the channel's number of an unconfirmed message: its id, its own number, and where its
        #: result is noted.
        self._pending: dict[int, tuple[Any, int, Known]] = {}
        #: The reasons of messages that came back, by their ids.
        self._unroutable: dict[Any, Exception] = {}

    def expect(self, number: int, message: Outgoing, known: Known) -> None:
        """Note the result of the message that was just sent when the broker has confirmed it."""
        self._last += 1
        self._pending[self._last] = _id_of(message.options), number, known

    def wait(self, connection: Any, limit_s: float) -> None:
        """Wait until each message is confirmed or refused.

        Raises the transport's exception, or `TimeoutError` after the limit.
        """
        until = monotonic() + limit_s
        while self._pending:
            left_s = until - monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out: the broker did not confirm all messages")
            connection.drain_events(timeout=left_s)

    # py-amqp calls these while it reads from the connection.

    def _acknowledged(self, tag: int, multiple: bool) -> None:
        for id, number, known in self._take(tag, multiple):
            known[number] = self._unroutable.pop(id, None)

    def _not_acknowledged(self, tag: int, multiple: bool) -> None:
        for _, number, known in self._take(tag, multiple):
            known[number] = MessageNacked("RabbitMQ could not store the message")

    def _returned(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """Note a message without a queue; its confirmation follows."""
        self._unroutable[_id_of(message.properties)] = UnroutableError(
            f"RabbitMQ has no queue for the message (exchange {exchange!r}, routing key "
            f"{routing_key!r}; {error}): start a worker that consumes it, or declare the queue in "
            "task_queues"
        )

    def _take(self, tag: int, multiple: bool) -> list[tuple[Any, int, Known]]:
        tags = [each for each in self._pending if each <= tag] if multiple else [tag]
        return [self._pending.pop(each) for each in tags if each in self._pending]


def _id_of(properties: Mapping[str, Any]) -> Any:
    return properties.get("correlation_id") or properties.get("message_id")
