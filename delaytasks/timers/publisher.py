"""Sends Celery messages over a connection of our own, in bounded time, and knows when it can not."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer
from kombu.utils.uuid import uuid

from delaytasks.core.availability import Availability
from delaytasks.core.bounded import within
from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child

#: A queue that the broker refuses is left alone for so long; others are not.
REFUSED_REST_S = 5.0
#: Each message after the first one adds this part of the time limit.
PER_MESSAGE = 0.1
#: What each transport calls the time that its socket may take.
_BOUNDS = {"redis": ("socket_timeout", "socket_connect_timeout"), "amqp": ("read_timeout", "write_timeout")}


def bounded_connection(app: Any, limit_s: float, url: str = "", **more: Any) -> Any:
    """An open connection on which neither connecting nor sending takes much longer than `limit_s`: to the app's broker
    with the app's options, or to another one; `more` are options of its transport."""
    make = functools.partial(Connection, url) if url else app.connection_for_write
    options = {**((not url and app.conf.broker_transport_options) or {}), **more}
    bounds = _BOUNDS.get(make(connect_timeout=limit_s).transport.driver_type, ())
    connection = make(connect_timeout=limit_s, transport_options={**options, **dict.fromkeys(bounds, limit_s)})
    # Said in full, since `default_channel` would try for ever, and `connect` rests 2 s between its two tries.
    connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=limit_s)
    return connection


#: What Redis answers to whatever is written: it is full, or no primary.
_NOT_OF_THE_QUEUE = {"OutOfMemoryError", "ReadOnlyError", "MasterDownError"}


class RefusedError(Exception):
    """The broker works, but will not have this queue."""


class BlockedError(Exception):
    """RabbitMQ takes nothing from those who publish, as long as it lacks memory or disk."""

    def __init__(self) -> None:
        super().__init__("the broker blocks those who publish (its alarm for memory or disk)")


class Publisher:
    """Thread-safe, and made anew after a fork. The database is the truth, so nothing is retried here.

    Callers wait for the time limit at most. One step is bounded by its socket; what may take many steps, as long as
    a connection has to be made or the broker is slow, is done in a thread, which ends it also when nobody waits.
    """

    def __init__(self, app: Any, namespace: str, limit_s: float, events: Events) -> None:
        self._app = app
        self._namespace = namespace
        self._limit_s = limit_s
        self._events = events
        self._broker = Availability(
            lambda error: events.emit("timer.down", error=error), lambda: events.emit("timer.up")
        )
        self._targets: dict[str, Queue] = {}
        #: Until when queues that were refused rest.
        self._refused: dict[str, float] = {}
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._connection: Any = None
        self._producer: Any = None
        self._declared: set[str] = set()
        self._is_quick = self._is_blocked = False

    @property
    def is_up(self) -> bool:
        return self._broker.is_up

    def queue(self, name: str) -> Queue:
        """The broker's queue for one of our logical queues."""
        full = f"{self._namespace}.{name}"
        kind = self._app.conf.get("task_default_queue_type", "classic")
        arguments = None if kind == "classic" else {"x-queue-type": kind}
        return Queue(full, Exchange(full, type="direct"), routing_key=full, queue_arguments=arguments)

    def send(self, name: str, queue: str, messages: list[tuple[list[Any], Mapping[str, Any]]]) -> bool:
        """One Celery task message per (args, options); False if the broker is away, or refuses the queue: the sweep
        will find the rows."""
        began = monotonic()
        if self._broker.is_resting or began < self._refused.get(queue, 0):
            return False
        if not self._lock.acquire(timeout=self._limit_s):
            return False  # another thread waits for the broker already
        if self._broker.is_resting:  # and it waited in vain
            self._lock.release()
            return False
        target = self._targets.get(queue) or self._targets.setdefault(queue, self.queue(queue))
        send = functools.partial(self._send_all, name, queue, target, messages)
        limit_s = self._limit_s * (1 + (len(messages) - 1) * PER_MESSAGE)
        if self._is_quick and target.name in self._declared:
            return send(began + limit_s - self._step_s)
        until = began + max(10 * limit_s, 10)
        try:
            left_s = began + limit_s - monotonic()
            return within(left_s, lambda: send(until), at_exit=lambda: send(began + limit_s - self._step_s))
        except TimeoutError:
            self._broker.failed(f"no answer within {limit_s:g} s")
            return False

    def rest(self, queue: str, seconds: float) -> None:
        """Send nothing to `queue` for a while: a worker has found that it cannot read what is there."""
        self._refused[queue] = monotonic() + seconds

    def close(self) -> None:
        if self._lock.acquire(timeout=self._limit_s):  # else a thread waits for the broker, and ends by itself
            try:
                self._close()
            finally:
                self._lock.release()

    @property
    def _step_s(self) -> float:
        return self._limit_s / 2

    def _send_all(
        self, name: str, queue: str, target: Queue, messages: list[tuple[list[Any], Mapping[str, Any]]], until: float
    ) -> bool:
        """Releases the lock, which the caller may have taken in another thread."""
        began, is_new = monotonic(), self._producer is None
        try:
            for args, options in messages:
                if monotonic() > until:
                    raise TimeoutError("the broker is too slow")
                self._send_one(name, target, args, options)
        except RefusedError as error:
            self._close()  # the broker has closed the channel
            self._broker.answered()
            self._tell_refused(queue, target, str(error))
            return False
        except BlockedError as error:
            self._broker.failed(str(error))  # on another connection it would say so only after the next message
            return False
        except Exception as error:  # each transport has errors of its own, and none of them is the caller's business
            self._close()
            self._broker.failed(f"{type(error).__name__}: {error}")
            return False
        finally:
            # Making a connection says nothing about the pace of sending.
            is_in_time = is_new or monotonic() - began < self._limit_s * PER_MESSAGE * len(messages)
            self._is_quick = self._producer is not None and is_in_time
            self._lock.release()
        self._refused.pop(queue, None)
        self._broker.answered()
        return True

    def _tell_refused(self, queue: str, target: Queue, error: str) -> None:
        is_new = queue not in self._refused
        self._refused[queue] = monotonic() + REFUSED_REST_S
        if is_new:
            remedy = (
                f"the broker's queue {target.name} is not what task_default_queue_type says, or not ours to use: "
                "correct the setting, or delete the queue while no worker runs; meanwhile its tasks run late"
            )
            self._events.emit("queue.refused", queue=queue, error=error, remedy=remedy)

    def _send_one(self, name: str, target: Queue, args: list[Any], options: Mapping[str, Any]) -> None:
        producer = self._producer or self._connect()
        if target.name not in self._declared:
            self._declare(target, producer.channel)
        self._demand_unblocked()
        message = self._app.amqp.as_task_v2(
            uuid(),
            name,
            args=args,
            eta=options.get("eta"),
            expires=options.get("expires"),
            argsrepr=options.get("repr", ""),
        )
        producer.publish(
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
        if self._is_blocked:  # which it said on the way: what is sent now waits in the socket
            raise BlockedError

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

    def _declare(self, target: Queue, channel: Any) -> None:
        try:
            target(channel).declare()
        except self._connection.channel_errors as error:
            if type(error).__name__ in _NOT_OF_THE_QUEUE:
                raise
            # Only here: what AMQP refuses of a message it says later, while another queue's is sent.
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        self._declared.add(target.name)

    def _connect(self) -> Any:
        self._connection = bounded_connection(self._app, self._step_s)
        if self._connection.transport.driver_type == "amqp":
            place = self._connection.connection
            place.on_blocked, place.on_unblocked = self._blocked, self._unblocked
        self._producer = Producer(self._connection.channel(), auto_declare=False)
        return self._producer

    def _close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        self._is_quick = self._is_blocked = False
        if connection is not None:
            try:
                connection.release()
            except Exception:
                pass  # it is broken: that is why it is closed
