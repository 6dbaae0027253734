"""Publishes messages of near rows in bounded time, over one link to the broker."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer
from kombu.utils.uuid import uuid

from delaytasks.events import Events
from delaytasks.loops import Availability, in_background
from delaytasks.model.clock import monotonic, reset_in_child

# -- The connection over which this process sends messages to the Celery app's broker -------------


#: The names of the errors with which Redis refuses each write: it is full, or not a primary.
REFUSES_ALL_WRITES = {"OutOfMemoryError", "ReadOnlyError", "MasterDownError"}
#: Redis's error for a key that is not a list.
WRONG_TYPE = "WRONGTYPE"


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


def remedy_of(error: str, name: str, prefix: str) -> str:
    """Return what an operator does about a refused queue."""
    if is_home_node_down(error):
        return (
            f"bring the RabbitMQ node of the queue {name} back, or use quorum queues "
            "(task_default_queue_type); meanwhile workers find its tasks in the table"
        )
    if WRONG_TYPE in error:
        return (
            f"the key {prefix}{name} in Redis is not a list: delete it; meanwhile its tasks run "
            "late"
        )
    return (
        f"the queue {name} is not of the type in task_default_queue_type, or its user may not use "
        "it: correct the setting, or delete the queue while no worker runs; its tasks run late"
    )


class RefusedError(Exception):
    """The broker works, but refuses this queue."""


class BlockedError(Exception):
    """RabbitMQ accepts no messages while it lacks memory or disk space."""

    def __init__(self) -> None:
        super().__init__("the broker blocks publishers (its alarm for memory or disk)")


class MessageGroup(NamedTuple):
    """Messages of one Celery task to one queue, each as (args, options)."""

    name: str
    target: Queue
    messages: list[tuple[list[Any], Mapping[str, Any]]]


class BrokerLink:
    """A connection, and the queues that were declared on it.

    Not thread-safe: `Publisher` ensures that one thread at a time uses it.
    """

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
        """Return whether sending to `target` is a single step, and the last one was quick."""
        return self._is_quick and target.name in self._declared

    def is_lost(self, error: BaseException) -> bool:
        """Return whether `error` means that the connection broke, and is not an answer of the
        broker.
        """
        return self._connection is None or isinstance(error, self._connection.connection_errors)

    def declare(self, target: Queue) -> None:
        """Declare `target`, and connect first if necessary.

        Raises `RefusedError` if the broker refuses this queue.
        """
        channel = (self._producer or self._connect()).channel
        if target.name in self._declared:
            return
        try:
            target(channel).declare()
        except self._connection.channel_errors as error:
            if type(error).__name__ in REFUSES_ALL_WRITES:
                raise
            # Only a declaration shows this: AMQP refuses a message later, while another one is
            # sent.
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        self._declared.add(target.name)

    def send(self, groups: Sequence[MessageGroup], until: float) -> None:
        """Send to queues that were declared. On Redis all messages are sent in one round trip.

        Raises `RefusedError` if the broker refuses one of the queues. The messages to the others
        may have arrived.
        """
        began, count = monotonic(), sum(len(group.messages) for group in groups)
        self._is_quick = False  # until the messages are sent
        self._check_unblocked()
        try:
            # kombu has batches since 5.7. For one message a batch only costs time.
            with (
                self._producer.batch()
                if count > 1 and hasattr(self._producer, "batch")
                else nullcontext()
            ):
                for group in groups:
                    for args, options in group.messages:
                        if monotonic() > until:
                            raise TimeoutError("the broker is too slow")
                        self._send_one(group.name, group.target, args, options)
        except Exception as error:
            # The cause is Redis's answer, or the error of the connection.
            cause = (type(error).__name__ == "BatchPublishError" and error.__cause__) or error
            if WRONG_TYPE in str(cause):
                raise RefusedError(f"{type(cause).__name__}: {cause}") from error
            raise cause from None
        if self._is_blocked:  # since this call began: the messages are still in the socket
            raise BlockedError
        self._is_quick = is_quick(monotonic() - began, self._limit_s, count)

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        self._is_blocked = self._is_quick = False
        if connection is not None:
            try:
                connection.release()
            except Exception:
                pass  # a broken connection

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
            # The default exchange needs no bindings, and the queue exists, since it was declared.
            exchange="",
            routing_key=target.name,
            serializer="json",
            headers={**message.headers, "ignore_result": True},
            delivery_mode=1,
            retry=False,
            **message.properties,
        )

    def _connect(self) -> Any:
        # A caller that sends itself writes once on AMQP, and waits for one round trip on Redis.
        self._connection = bounded_connection(
            self._app, self._limit_s, connect_step_s=CONNECT_STEP_S, write_timeout=self._limit_s / 2
        )
        if self._connection.transport.driver_type == "amqp":
            amqp = self._connection.connection
            amqp.on_blocked, amqp.on_unblocked = self._blocked, self._unblocked
        self._producer = Producer(self._connection.channel(), auto_declare=False)
        return self._producer

    def _check_unblocked(self) -> None:
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


#: The limit for each step of connecting. A healthy server may be far away, and the process may be
#: busy with imports.
CONNECT_STEP_S = 2.0
#: A step that takes less than this part of its time limit is quick.
_QUICK_PART = 0.1


def is_quick(took_s: float, limit_s: float, steps: int = 1) -> bool:
    """Return whether `steps` steps were quick enough that callers may take the next ones
    themselves.

    Otherwise a thread takes them, so that callers wait no longer than `limit_s`.
    """
    return took_s < limit_s * _QUICK_PART * steps


def broker_error(app: Any, queue: Queue, limit_s: float) -> str | None:
    """Return the error of the broker, or of the node that has the queue; None if both answer."""
    try:
        with bounded_connection(app, limit_s) as connection:
            return _lost_queue(queue, connection)
    except Exception as reason:  # each transport has its own errors, and all mean the same
        return f"{type(reason).__name__}: {reason}"


def _lost_queue(queue: Queue, connection: Any) -> str | None:
    """Return the broker's error if the node of the queue is down."""
    try:
        connection.default_channel.queue_declare(queue=queue.name, passive=True)
    except connection.channel_errors as reason:  # usually: the queue is not declared yet
        return f"{type(reason).__name__}: {reason}" if is_home_node_down(reason) else None
    return None


#: Nothing is sent to a queue for this time after the broker has refused it.
REFUSED_QUEUE_REST_S = 5.0
#: Each message after the first one extends the time limit by this part of it.
LIMIT_PART_PER_MESSAGE = 0.1
#: The number of messages that wait for a connection. The sweep finds the rows of further ones.
MAX_WAITING_MESSAGES = 10_000


class SendRequest:
    """A message group to send, and its result. A caller may wait for the result."""

    def __init__(self, queue: str, group: MessageGroup) -> None:
        self.queue = queue
        self.group = group
        self.is_sent = False
        #: Only for a caller that waits: creating it takes longer than everything else here.
        self._is_over: threading.Event | None = None

    def leave_to_sender(self) -> None:
        self._is_over = threading.Event()

    def end(self, is_sent: bool) -> None:
        self.is_sent = is_sent
        if self._is_over is not None:
            self._is_over.set()

    def wait(self, seconds: float) -> bool:
        """Return whether the request ended within this time."""
        return self._is_over is None or self._is_over.wait(max(seconds, 0))


class Publisher:
    """Sends messages for any thread, and is reset after a fork.

    While the broker is quick and no other thread sends, the caller sends its own messages.
    Otherwise one thread, the sender, connects and sends the messages of all callers, and each
    caller waits up to its time limit. The sender still sends the messages of a caller that no
    longer waits, since their rows are committed. Nothing is kept for an unavailable broker.
    """

    def __init__(self, app: Any, namespace: str, limit_s: float, events: Events) -> None:
        self._app = app
        self.namespace = namespace
        self._limit_s = limit_s
        self._events = events
        self._broker = Availability(
            lambda error: events.emit("timer.down", error=error), lambda: events.emit("timer.up")
        )
        self._targets: dict[str, Queue] = {}
        #: By refused queue: the time until which nothing is sent to it.
        self._refused: dict[str, float] = {}
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        """Forget the requests of the parent process, whose sender sends them."""
        self._lock = threading.Lock()
        self._link = BrokerLink(self._app, self._limit_s)
        self._waiting: list[SendRequest] = []
        self._waiting_messages = 0
        #: Whether a thread uses the link. Only that thread sets this to False.
        self._is_sending = False
        #: Whether a caller reached its time limit: none waits until the sender succeeds or fails.
        self._is_late = False

    @property
    def is_up(self) -> bool:
        return self._broker.is_up and not self._is_late

    def queue(self, name: str) -> Queue:
        """Return the broker's queue for a logical queue."""
        full = f"{self.namespace}.{name}"
        kind = self._app.conf.get("task_default_queue_type", "classic")
        arguments = None if kind == "classic" else {"x-queue-type": kind}
        return Queue(
            full, Exchange(full, type="direct"), routing_key=full, queue_arguments=arguments
        )

    def send(
        self, name: str, queue: str, messages: list[tuple[list[Any], Mapping[str, Any]]]
    ) -> bool:
        """Send one message of the Celery task `name` per (args, options).

        Return False if the broker is unavailable, refuses the queue, or does not accept the
        messages within the time limit. The sweep then finds the rows.
        """
        began = monotonic()
        if self._broker.is_resting or began < self._refused.get(queue, 0):
            return False
        target = self._targets.get(queue) or self._targets.setdefault(queue, self.queue(queue))
        request = SendRequest(queue, MessageGroup(name, target, messages))
        limit_s = self._limit_s * (1 + (len(messages) - 1) * LIMIT_PART_PER_MESSAGE)
        with self._lock:
            is_own = not self._is_sending and self._link.is_quick_for(target)
            if is_own:
                self._is_sending = True
            elif not self._add(request):
                return False
        if is_own and self._send_own(request, began, began + limit_s):
            return request.is_sent
        if self._is_late:
            return False
        if not request.wait(began + limit_s - monotonic()):
            with self._lock:
                self._is_late = self._is_sending
            return False
        return request.is_sent

    def rest(self, queue: str, seconds: float) -> None:
        """Send nothing to `queue` for `seconds`: a worker found that it cannot read the queue."""
        self._refused[queue] = monotonic() + seconds

    def close(self) -> None:
        """Close the connection, unless a thread is using it."""
        with self._lock:
            if self._is_sending:
                return  # that thread waits for the broker, and ends by itself
            self._is_sending = True
        self._link.close()
        self._stop_sending()

    # -- sending ----------------------------------------------------------------------------------

    def _add(self, request: SendRequest) -> bool:
        """Give a request to the sender. The caller has the lock."""
        if self._waiting_messages > MAX_WAITING_MESSAGES:
            return False
        request.leave_to_sender()
        self._waiting.append(request)
        self._waiting_messages += len(request.group.messages)
        if not self._is_sending:
            self._begin_sending()
        return True

    def _begin_sending(self) -> None:
        """Start the sender. The caller has the lock."""
        self._is_sending = True
        if not in_background(self._send_waiting, "send"):
            self._lock.release()
            try:
                self._send_waiting()
            finally:
                self._lock.acquire()

    def _stop_sending(self) -> None:
        with self._lock:
            self._is_sending = False
            if self._waiting:
                self._begin_sending()

    def _send_own(self, request: SendRequest, began: float, until: float) -> bool:
        """Return False if the connection broke, and the sender tries again with a new one."""
        try:
            if not self._is_refused(
                request, lambda one: self._link.send([one.group], until - self._limit_s / 2)
            ):
                self._succeeded([request])
        except SoftTimeLimitExceeded:
            # The time limit of the caller's own task, which says nothing about the broker.
            self._link.close()
            request.end(is_sent=False)
            raise
        except Exception as error:  # each transport has errors of its own
            # A closed connection fails early, and a broker that does not answer fails late.
            if self._link.is_lost(error) and monotonic() - began < self._limit_s / 2:
                self._link.close()
                with self._lock:
                    self._add(request)
                return False
            self._failed([request], error)
        finally:
            self._stop_sending()
        return True

    def _send_waiting(self) -> None:
        """Send all requests, until none waits."""
        while True:
            with self._lock:
                requests, self._waiting, self._waiting_messages = self._waiting, [], 0
                if not requests:
                    self._is_sending = self._is_late = False
                    return
            is_used = self._link.is_open
            try:
                try:
                    self._send_all(requests)
                except Exception as error:
                    if not is_used or not self._link.is_lost(error):
                        raise
                    # It was closed while it was idle, so a new connection may work.
                    self._link.close()
                    self._send_all(requests)
            except Exception as error:  # each transport has errors of its own
                with self._lock:  # no request may begin before callers see the failure
                    requests += self._waiting
                    self._waiting, self._waiting_messages = [], 0
                self._failed(requests, error)

    def _send_all(self, requests: list[SendRequest]) -> None:
        left = [request for request in requests if not self._is_refused(request, self._declare)]
        for request in left:
            self._link.declare(request.group.target)  # again, if a refusal closed the channel
        try:
            self._send(left)
        except RefusedError:  # of one of the queues, and the error does not name it
            left = [
                request
                for request in left
                if not self._is_refused(request, lambda one: self._send([one]))
            ]
        self._succeeded(left)

    def _declare(self, request: SendRequest) -> None:
        try:
            self._link.declare(request.group.target)
        except RefusedError:
            self._link.close()  # the broker has closed the channel
            raise

    def _send(self, requests: list[SendRequest]) -> None:
        if requests:
            self._link.send([request.group for request in requests], float("inf"))

    def _is_refused(self, request: SendRequest, step: Callable[[SendRequest], None]) -> bool:
        try:
            step(request)
        except RefusedError as error:
            self._broker.answered()
            self._report_refused(request.queue, request.group.target, str(error))
            request.end(is_sent=False)
            return True
        return False

    # -- results ----------------------------------------------------------------------------------

    def _succeeded(self, requests: list[SendRequest]) -> None:
        self._is_late = False
        self._broker.answered()
        for request in requests:
            self._refused.pop(request.queue, None)
            request.end(is_sent=True)

    def _failed(self, requests: list[SendRequest], error: Exception) -> None:
        is_blocked = isinstance(error, BlockedError)
        # On another connection RabbitMQ reports that it blocks publishers only after the next
        # message.
        if not is_blocked:
            self._link.close()
        self._is_late = False
        self._broker.failed(str(error) if is_blocked else f"{type(error).__name__}: {error}")
        for request in requests:
            request.end(is_sent=False)

    def _report_refused(self, queue: str, target: Queue, error: str) -> None:
        is_new = queue not in self._refused
        self._refused[queue] = monotonic() + REFUSED_QUEUE_REST_S
        if is_new:
            prefix = (self._app.conf.broker_transport_options or {}).get("global_keyprefix", "")
            remedy = remedy_of(error, target.name, prefix)
            self._events.emit("queue.refused", queue=queue, error=error, remedy=remedy)
