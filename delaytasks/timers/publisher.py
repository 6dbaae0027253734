"""Sends Celery messages within a time limit, and records whether the broker accepts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from kombu.entity import Exchange, Queue

from delaytasks.core.clock import monotonic, reset_in_child
from delaytasks.core.events import Events
from delaytasks.core.loop import Availability, in_background
from delaytasks.timers.broker_link import (
    BlockedError,
    BrokerLink,
    MessageGroup,
    RefusedError,
    remedy_of,
)

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
