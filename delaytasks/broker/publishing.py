"""Publishes Celery tasks of ours to our queues, and lets the broker or a queue rest that fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kombu.entity import Exchange, Queue
from kombu.utils.uuid import uuid

from delaytasks.broker.link import (
    WRONG_TYPE,
    BrokerLink,
    OutageError,
    Outgoing,
    QueueAwayError,
    is_home_node_down,
)
from delaytasks.events import Events
from delaytasks.loops import Availability
from delaytasks.model.clock import monotonic

#: Nothing is sent to a queue for this time after the broker has refused it.
REFUSED_QUEUE_REST_S = 5.0


class Publisher:
    """Keeps nothing for an unavailable broker: the sweep finds the rows."""

    def __init__(self, app: Any, namespace: str, limit_s: float, events: Events) -> None:
        self._app = app
        self.namespace = namespace
        self._events = events
        self._link = BrokerLink(app, limit_s)
        self._broker = Availability(
            lambda error: events.emit("timer.down", error=error), lambda: events.emit("timer.up")
        )
        self._targets: dict[str, Queue] = {}
        #: By refused queue: the time until which nothing is sent to it.
        self._refused: dict[str, float] = {}

    @property
    def is_up(self) -> bool:
        return self._broker.is_up

    def queue(self, name: str) -> Queue:
        """Return the broker's queue for a logical queue."""
        full = f"{self.namespace}.{name}"
        kind = self._app.conf.get("task_default_queue_type", "classic")
        arguments = None if kind == "classic" else {"x-queue-type": kind}
        return Queue(
            full, Exchange(full, type="direct"), routing_key=full, queue_arguments=arguments
        )

    def connect(self) -> None:
        """Find out whether the broker is available."""
        if not self._broker.is_resting:
            try:
                self._link.publish([])
            except OutageError as error:
                self._broker.failed(str(error))
            else:
                self._broker.answered()

    def send(
        self, name: str, queue: str, messages: Sequence[tuple[list[Any], Mapping[str, Any]]]
    ) -> bool:
        """Send one message of the Celery task `name` per (args, options).

        Return False if the broker is unavailable, or refuses the queue. The sweep then finds the
        rows.
        """
        if self._broker.is_resting or monotonic() < self._refused.get(queue, 0):
            return False
        target = self._targets.get(queue) or self._targets.setdefault(queue, self.queue(queue))
        results = self._link.publish(
            [self._message(name, target, args, options) for args, options in messages]
        )
        error = next((result for result in results if result is not None), None)
        if isinstance(error, OutageError) and not isinstance(error, QueueAwayError):
            self._broker.failed(str(error))
        else:
            self._broker.answered()
            if error is not None:
                self._report_refused(queue, target, f"{type(error).__name__}: {error}")
            else:
                self._refused.pop(queue, None)
        return error is None

    def rest(self, queue: str, seconds: float) -> None:
        """Send nothing to `queue` for `seconds`: a worker found that it cannot read the queue."""
        self._refused[queue] = monotonic() + seconds

    def close(self) -> None:
        self._link.close()

    def _message(
        self, name: str, target: Queue, args: list[Any], options: Mapping[str, Any]
    ) -> Outgoing:
        message = self._app.amqp.as_task_v2(
            uuid(),
            name,
            args=args,
            eta=options.get("eta"),
            expires=options.get("expires"),
            argsrepr=options.get("repr", ""),
        )
        return Outgoing(
            message.body,
            {
                # The default exchange needs no bindings, and the queue exists, since it was
                # declared.
                "exchange": "",
                "routing_key": target.name,
                "serializer": "json",
                "headers": {**message.headers, "ignore_result": True},
                "delivery_mode": 1,
                **message.properties,
            },
            target,
        )

    def _report_refused(self, queue: str, target: Queue, error: str) -> None:
        is_new = queue not in self._refused
        self.rest(queue, REFUSED_QUEUE_REST_S)
        if is_new:
            prefix = (self._app.conf.broker_transport_options or {}).get("global_keyprefix", "")
            remedy = _remedy_of(error, target.name, prefix)
            self._events.emit("queue.refused", queue=queue, error=error, remedy=remedy)


def _remedy_of(error: str, name: str, prefix: str) -> str:
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
