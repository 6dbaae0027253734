"""Sends Celery messages in bounded time, whichever thread asks, and knows whether the broker takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from kombu.entity import Exchange, Queue

from delaytasks.core.availability import Availability
from delaytasks.core.bounded_calls import in_background
from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child
from delaytasks.timers.broker_link import (
    WRONG_TYPE,
    BlockedError,
    BrokerLink,
    Letter,
    RefusedError,
    is_home_node_down,
)

#: A queue that the broker refuses is left alone for so long; others are not.
REFUSED_REST_S = 5.0
#: Each message after the first one adds this part of the time limit.
PER_MESSAGE = 0.1
#: More messages than this do not wait for a connection: they are rows, and the sweep finds them.
MOST_WAITING = 10_000


class Sending:
    """A letter on its way, and the caller who waits for it."""

    def __init__(self, queue: str, letter: Letter) -> None:
        self.queue = queue
        self.letter = letter
        self.is_sent = False
        #: Only for callers who wait: it takes longer to make than all the rest.
        self._is_over: threading.Event | None = None

    def leave_to_sender(self) -> None:
        self._is_over = threading.Event()

    def end(self, is_sent: bool) -> None:
        self.is_sent = is_sent
        if self._is_over is not None:
            self._is_over.set()

    def wait(self, seconds: float) -> bool:
        """Whether it ended within that time."""
        return self._is_over is None or self._is_over.wait(max(seconds, 0))


class Publisher:
    """Thread-safe, and made anew after a fork. The database is the truth, so nothing is kept for a broker that is away.

    While the broker is quick and no other thread sends, the caller sends its own letter. Otherwise one thread connects
    and sends all letters that have gathered, and callers wait for it as long as the time limit allows. A caller that
    stops waiting takes nothing back: its rows are committed, and the thread sends the letter as soon as it can.
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
        """Letters that wait belong to the parent, whose thread sends them."""
        self._lock = threading.Lock()
        self._link = BrokerLink(self._app, self._limit_s)
        self._waiting: list[Sending] = []
        self._waiting_messages = 0
        #: Whether a thread uses the link; it alone may until it sets this to False.
        self._is_sending = False
        #: A caller has waited in vain for the sender, which goes on: until that gets somewhere nobody else waits.
        self._is_late = False

    @property
    def is_up(self) -> bool:
        return self._broker.is_up and not self._is_late

    def queue(self, name: str) -> Queue:
        """The broker's queue for one of our logical queues."""
        full = f"{self._namespace}.{name}"
        kind = self._app.conf.get("task_default_queue_type", "classic")
        arguments = None if kind == "classic" else {"x-queue-type": kind}
        return Queue(
            full, Exchange(full, type="direct"), routing_key=full, queue_arguments=arguments
        )

    def send(
        self, name: str, queue: str, messages: list[tuple[list[Any], Mapping[str, Any]]]
    ) -> bool:
        """Send one message of the Celery task `name` per (args, options).

        False if the broker is away, refuses the queue, or has not taken the messages within the time limit: the sweep
        looks after the rows.
        """
        began = monotonic()
        if self._broker.is_resting or began < self._refused.get(queue, 0):
            return False
        target = self._targets.get(queue) or self._targets.setdefault(queue, self.queue(queue))
        sending = Sending(queue, Letter(name, target, messages))
        limit_s = self._limit_s * (1 + (len(messages) - 1) * PER_MESSAGE)
        with self._lock:
            is_own = not self._is_sending and self._link.is_quick_for(target)
            if is_own:
                self._is_sending = True
            elif not self._add(sending):
                return False
        if is_own and self._send_own(sending, began, began + limit_s):
            return sending.is_sent
        if self._is_late:
            return False
        if not sending.wait(began + limit_s - monotonic()):
            with self._lock:
                self._is_late = self._is_sending
            return False
        return sending.is_sent

    def rest(self, queue: str, seconds: float) -> None:
        """Send nothing to `queue` for a while: a worker has found that it cannot read what is there."""
        self._refused[queue] = monotonic() + seconds

    def close(self) -> None:
        """Close the connection, unless a thread is using it."""
        with self._lock:
            if self._is_sending:
                return  # it waits for the broker, and ends by itself
            self._is_sending = True
        self._link.close()
        self._stop_sending()

    # -- who sends --------------------------------------------------------------------------------

    def _add(self, sending: Sending) -> bool:
        """Leave it to the sender. The caller holds the lock."""
        if self._waiting_messages > MOST_WAITING:
            return False
        sending.leave_to_sender()
        self._waiting.append(sending)
        self._waiting_messages += len(sending.letter.messages)
        if not self._is_sending:
            self._begin_sending()
        return True

    def _begin_sending(self) -> None:
        """Start the sender. The caller holds the lock."""
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

    def _send_own(self, sending: Sending, began: float, until: float) -> bool:
        """Send in the caller's thread. False if a connection broke and the sender tries again with a new one."""
        try:
            if not self._is_refused(
                sending, lambda one: self._link.send([one.letter], until - self._limit_s / 2)
            ):
                self._succeeded([sending])
        except (
            SoftTimeLimitExceeded
        ):  # the caller's own, which struck in here: it says nothing about the broker
            self._link.close()
            sending.end(is_sent=False)
            raise
        except Exception as error:  # each transport has errors of its own, and none of them is the caller's business
            # A black hole takes its time; a connection that was closed meanwhile does not.
            if self._link.is_lost(error) and monotonic() - began < self._limit_s / 2:
                self._link.close()
                with self._lock:
                    self._add(sending)
                return False
            self._failed([sending], error)
        finally:
            self._stop_sending()
        return True

    def _send_waiting(self) -> None:
        """Send what waits, until nothing does."""
        while True:
            with self._lock:
                sendings, self._waiting, self._waiting_messages = self._waiting, [], 0
                if not sendings:
                    self._is_sending = self._is_late = False
                    return
            is_used = self._link.is_open
            try:
                try:
                    self._send_all(sendings)
                except Exception as error:
                    if not is_used or not self._link.is_lost(error):
                        raise
                    self._link.close()  # it was closed while nobody used it: that says nothing about a new one
                    self._send_all(sendings)
            except Exception as error:  # each transport has errors of its own
                with self._lock:  # the rest may not begin before callers see it
                    sendings += self._waiting
                    self._waiting, self._waiting_messages = [], 0
                self._failed(sendings, error)

    def _send_all(self, sendings: list[Sending]) -> None:
        left = [sending for sending in sendings if not self._is_refused(sending, self._declare)]
        for sending in left:
            self._link.declare(sending.letter.target)  # again, if a refusal has cost the channel
        try:
            self._send(left)
        except RefusedError:  # of one of the queues, and nobody says which
            left = [
                sending
                for sending in left
                if not self._is_refused(sending, lambda one: self._send([one]))
            ]
        self._succeeded(left)

    def _declare(self, sending: Sending) -> None:
        try:
            self._link.declare(sending.letter.target)
        except RefusedError:
            self._link.close()  # the broker has closed the channel
            raise

    def _send(self, sendings: list[Sending]) -> None:
        if sendings:
            self._link.send([sending.letter for sending in sendings], float("inf"))

    def _is_refused(self, sending: Sending, step: Callable[[Sending], None]) -> bool:
        try:
            step(sending)
        except RefusedError as error:
            self._broker.answered()
            self._tell_refused(sending.queue, sending.letter.target, str(error))
            sending.end(is_sent=False)
            return True
        return False

    # -- what became of it ------------------------------------------------------------------------

    def _succeeded(self, sendings: list[Sending]) -> None:
        self._is_late = False
        self._broker.answered()
        for sending in sendings:
            self._refused.pop(sending.queue, None)
            sending.end(is_sent=True)

    def _failed(self, sendings: list[Sending], error: Exception) -> None:
        if not isinstance(
            error, BlockedError
        ):  # on another connection it would say so only after the next message
            self._link.close()
        self._is_late = False
        self._broker.failed(
            str(error) if isinstance(error, BlockedError) else f"{type(error).__name__}: {error}"
        )
        for sending in sendings:
            sending.end(is_sent=False)

    def _tell_refused(self, queue: str, target: Queue, error: str) -> None:
        is_new = queue not in self._refused
        self._refused[queue] = monotonic() + REFUSED_REST_S
        if is_new:
            remedy = (
                f"the broker's queue {target.name} is not what task_default_queue_type says, or not ours to use: "
                "correct the setting, or delete the queue while no worker runs; meanwhile its tasks run late"
            )
            if is_home_node_down(error):
                remedy = (
                    f"bring the RabbitMQ node of the queue {target.name} back, or use quorum queues "
                    "(task_default_queue_type), which outlive a node; meanwhile workers find its tasks in the table"
                )
            elif WRONG_TYPE in error:
                remedy = f"the key {target.name} in Redis is not a list: delete it; meanwhile its tasks run late"
            self._events.emit("queue.refused", queue=queue, error=error, remedy=remedy)
