"""Sends Celery messages over a connection of our own, in bounded time, and knows when it can not."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from kombu.entity import Exchange, Queue
from kombu.messaging import Producer
from kombu.utils.uuid import uuid

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child

#: After a failure nothing is tried for this long: callers must not wait for a broker that is away.
REST_S = 1.0
#: What each transport calls the time that its socket may take.
_BOUNDS = {"redis": ("socket_timeout", "socket_connect_timeout"), "amqp": ("read_timeout", "write_timeout")}


def bounded_connection(app: Any, limit_s: float) -> Any:
    """An open connection on which neither connecting nor sending takes much longer than `limit_s`."""
    connection = app.connection_for_write(connect_timeout=limit_s)
    bounds = _BOUNDS.get(connection.transport.driver_type, ())
    options = {**(app.conf.broker_transport_options or {}), **dict.fromkeys(bounds, limit_s)}
    connection = app.connection_for_write(connect_timeout=limit_s, transport_options=options)
    # Said in full, since `default_channel` would try for ever, and `connect` rests 2 s between its two tries.
    connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=limit_s)
    return connection


class Publisher:
    """Thread-safe, and made anew after a fork. The database is the truth, so nothing is retried here."""

    def __init__(self, app: Any, namespace: str, limit_s: float, events: Events) -> None:
        self._app = app
        self._namespace = namespace
        self._limit_s = limit_s
        self._events = events
        self.is_up = True
        self._rests_until = 0.0
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._connection: Any = None
        self._producer: Any = None
        self._declared: set[str] = set()

    def queue(self, name: str) -> Queue:
        """The broker's queue for one of our logical queues."""
        full = f"{self._namespace}.{name}"
        kind = self._app.conf.get("task_default_queue_type", "classic")
        arguments = None if kind == "classic" else {"x-queue-type": kind}
        return Queue(full, Exchange(full, type="direct"), routing_key=full, queue_arguments=arguments)

    def send(self, name: str, queue: str, messages: list[tuple[list[Any], Mapping[str, Any]]]) -> bool:
        """One Celery task message per (args, options); False if the broker is away: the sweep will find the rows."""
        if monotonic() < self._rests_until:
            return False
        if not self._lock.acquire(timeout=self._limit_s):
            return False  # another thread waits for the broker already
        try:
            for args, options in messages:
                self._send_one(name, queue, args, options)
        except Exception as error:  # each transport has errors of its own, and none of them is the caller's business
            self._close()
            self._rests_until = monotonic() + REST_S
            if self.is_up:
                self.is_up = False
                self._events.emit("timer.down", error=f"{type(error).__name__}: {error}")
            return False
        finally:
            self._lock.release()
        if not self.is_up:
            self.is_up = True
            self._events.emit("timer.up")
        return True

    def close(self) -> None:
        with self._lock:
            self._close()

    def _send_one(self, name: str, queue: str, args: list[Any], options: Mapping[str, Any]) -> None:
        producer = self._producer or self._connect()
        target = self.queue(queue)
        if target.name not in self._declared:
            target(producer.channel).declare()
            self._declared.add(target.name)
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

    def _connect(self) -> Any:
        self._connection = bounded_connection(self._app, self._limit_s)
        self._producer = Producer(self._connection.channel(), auto_declare=False)
        return self._producer

    def _close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        if connection is not None:
            try:
                connection.release()
            except Exception:
                pass  # it is broken: that is why it is closed
