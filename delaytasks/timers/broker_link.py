"""The connection over which this process sends messages to the Celery app's broker."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Producer
from kombu.utils.uuid import uuid

from delaytasks.core.clock import monotonic

#: One step of connecting may take this long: a healthy broker may be far away, and the process busy with its imports.
CONNECT_STEP_S = 2.0
#: Sending a message in less than this part of the time limit shows that the caller itself can send the next one.
QUICK = 0.1


def bounded_connection(
    app: Any, limit_s: float, url: str = "", connect_step_s: float | None = None, **more: Any
) -> Any:
    """Return an open connection on which a step of sending takes at most `limit_s`.

    `connect_step_s` bounds each step of connecting, and is `limit_s` by default. The connection is to the app's broker
    with the app's options, or to `url`; `more` are options of its transport.
    """
    step_s = limit_s if connect_step_s is None else connect_step_s
    make = functools.partial(Connection, url) if url else app.connection_for_write
    options = (not url and app.conf.broker_transport_options) or {}
    is_confirmed = {**options, **more}.get("confirm_publish")
    bounds = {
        "redis": {"socket_timeout": limit_s, "socket_connect_timeout": step_s},
        # Sending reads nothing, unless each message is confirmed; declaring a queue does.
        "amqp": {"read_timeout": limit_s if is_confirmed else step_s, "write_timeout": limit_s},
    }.get(make(connect_timeout=step_s).transport.driver_type, {})
    connection = make(connect_timeout=step_s, transport_options={**options, **bounds, **more})
    # Said in full, since `default_channel` would try for ever, and `connect` rests 2 s between its two tries. Each of
    # several URLs is tried once.
    urls = max(len(connection.alt or ()), 1)
    connection.ensure_connection(
        max_retries=urls - 1, interval_start=0, interval_step=0, timeout=step_s * urls
    )
    return connection


#: What Redis answers to whatever is written: it is full, or no primary.
_NOT_OF_THE_QUEUE = {"OutOfMemoryError", "ReadOnlyError", "MasterDownError"}
#: What Redis answers if the queue's key is not a list.
WRONG_TYPE = "WRONGTYPE"


def is_home_node_down(error: BaseException | str) -> bool:
    """Whether RabbitMQ says that a classic queue is on a node of its cluster that is down: the queue is there again
    when that node is."""
    return "NOT_FOUND" in str(error) and "home node" in str(error)


class RefusedError(Exception):
    """The broker works, but will not have this queue."""


class BlockedError(Exception):
    """RabbitMQ takes nothing from those who publish, as long as it lacks memory or disk."""

    def __init__(self) -> None:
        super().__init__("the broker blocks those who publish (its alarm for memory or disk)")


class Letter(NamedTuple):
    """Messages of one Celery task to one queue, as (args, options) each."""

    name: str
    target: Queue
    messages: list[tuple[list[Any], Mapping[str, Any]]]


class BrokerLink:
    """A connection, and what has been declared on it. Not thread-safe: `Publisher` lets one thread at a time use it."""

    def __init__(self, app: Any, limit_s: float) -> None:
        self._app = app
        self._limit_s = limit_s
        self._connection: Any = None
        self._producer: Any = None
        self._declared: set[str] = set()
        self._is_blocked = self._is_quick = False

    @property
    def is_open(self) -> bool:
        return self._producer is not None

    def is_quick_for(self, target: Queue) -> bool:
        """Whether sending to `target` is a single step, and took little time before."""
        return self._is_quick and target.name in self._declared

    def is_lost(self, error: BaseException) -> bool:
        """Whether `error` says that the connection has broken, not what the broker answered."""
        return self._connection is None or isinstance(error, self._connection.connection_errors)

    def declare(self, target: Queue) -> None:
        """Declare `target`, connecting first if necessary; `RefusedError` if the broker will not have this queue."""
        channel = (self._producer or self._connect()).channel
        if target.name in self._declared:
            return
        try:
            target(channel).declare()
        except self._connection.channel_errors as error:
            if type(error).__name__ in _NOT_OF_THE_QUEUE:
                raise
            # Only here: what AMQP refuses of a message it says later, while another queue's is sent.
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        self._declared.add(target.name)

    def send(self, letters: Sequence[Letter], until: float) -> None:
        """Send to queues that have been declared. On Redis all messages travel in one round trip.

        `RefusedError` if the broker will not have one of the queues; the messages to others may have arrived.
        """
        began, count = monotonic(), sum(len(letter.messages) for letter in letters)
        self._is_quick = False  # until it is seen
        self._demand_unblocked()
        try:
            # Kombu has batches since 5.7. For one message they would only cost time.
            with (
                self._producer.batch()
                if count > 1 and hasattr(self._producer, "batch")
                else nullcontext()
            ):
                for letter in letters:
                    for args, options in letter.messages:
                        if monotonic() > until:
                            raise TimeoutError("the broker is too slow")
                        self._send_one(letter.name, letter.target, args, options)
        except Exception as error:
            # The cause is what Redis answered, or what happened to the connection.
            cause = (type(error).__name__ == "BatchPublishError" and error.__cause__) or error
            if WRONG_TYPE in str(cause):
                raise RefusedError(f"{type(cause).__name__}: {cause}") from error
            raise cause from None
        if self._is_blocked:  # which it said on the way: what is sent now waits in the socket
            raise BlockedError
        self._is_quick = monotonic() - began < self._limit_s * QUICK * count

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        self._is_blocked = self._is_quick = False
        if connection is not None:
            try:
                connection.release()
            except Exception:
                pass  # it is broken: that is why it is closed

    def _send_one(
        self, name: str, target: Queue, args: list[Any], options: Mapping[str, Any]
    ) -> None:
        message = self._app.amqp.as_task_v2(
            uuid(),
            name,
            args=args,
            eta=options.get("eta"),
            expires=options.get("expires"),
            argsrepr=options.get("repr", ""),
        )
        self._producer.publish(
            message.body,
            # By the default exchange: no look-up of bindings, and the queue is there, since it was declared.
            exchange="",
            routing_key=target.name,
            serializer="json",
            headers={**message.headers, "ignore_result": True},
            delivery_mode=1,
            retry=False,
            **message.properties,
        )

    def _connect(self) -> Any:
        # The caller's own step on AMQP is a write; on Redis it is the one round trip of a batch.
        self._connection = bounded_connection(
            self._app, self._limit_s, connect_step_s=CONNECT_STEP_S, write_timeout=self._limit_s / 2
        )
        if self._connection.transport.driver_type == "amqp":
            place = self._connection.connection
            place.on_blocked, place.on_unblocked = self._blocked, self._unblocked
        self._producer = Producer(self._connection.channel(), auto_declare=False)
        return self._producer

    def _demand_unblocked(self) -> None:
        if self._is_blocked:
            try:
                self._connection.drain_events(timeout=0)
            except TimeoutError:
                pass  # it has nothing to say
            if self._is_blocked:
                raise BlockedError

    def _blocked(self, _reason: str) -> None:
        self._is_blocked = True

    def _unblocked(self) -> None:
        self._is_blocked = False
