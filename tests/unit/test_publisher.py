"""If a broker refuses one queue, it still receives the messages of the others.

The tests use an in-memory broker.
"""

from __future__ import annotations

from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from kombu.connection import Connection
from kombu.entity import Queue

from delaytasks.core import loop as availability
from delaytasks.core.events import Events
from delaytasks.timers import publisher as broker_module
from delaytasks.timers import publisher as publisher_module
from delaytasks.timers.publisher import Publisher

MESSAGE: list[tuple[list[Any], dict[str, Any]]] = [([[]], {})]


class Refused(Queue):
    """A queue that answers as RabbitMQ does if the queue exists with other arguments."""

    def declare(self, *arguments: Any, **options: Any) -> Any:
        if self.routing_key in RefusedPublisher.refused:
            raise PreconditionFailed("inequivalent arg 'x-queue-type'")
        return super().declare(*arguments, **options)


class RefusedPublisher(Publisher):
    """A publisher whose broker refuses some queues."""

    refused: frozenset[str] = frozenset()
    now = 1000.0

    def __init__(self) -> None:
        app = Celery("test", broker="memory://", set_as_current=False)
        self.emitted: list[tuple[str, dict[str, Any]]] = []
        events = Events()
        events.subscribe(lambda name, fields: self.emitted.append((name, fields)))
        super().__init__(app, "refusal", 0.5, events)

    def queue(self, name: str) -> Queue:
        queue = super().queue(name)
        return Refused(queue.name, queue.exchange, routing_key=queue.routing_key)

    def sends_to(self, queue: str) -> bool:
        return self.send("delaytasks.run", queue, MESSAGE)

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.emitted]


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> RefusedPublisher:
    monkeypatch.setattr(RefusedPublisher, "refused", frozenset({"refusal.bad"}))
    monkeypatch.setattr(RefusedPublisher, "now", 1000.0)
    for module in (publisher_module, broker_module, availability):
        monkeypatch.setattr(module, "monotonic", lambda: RefusedPublisher.now)
    return RefusedPublisher()


def test_a_refused_queue_is_tried_again_after_its_pause_and_reported_once(
    publisher: RefusedPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not publisher.sends_to("bad")
    monkeypatch.setattr(RefusedPublisher, "refused", frozenset[str]())
    assert not publisher.sends_to("bad"), "it rests"
    RefusedPublisher.now += publisher_module.REFUSED_QUEUE_REST_S + 0.1
    assert publisher.sends_to("bad")
    monkeypatch.setattr(RefusedPublisher, "refused", frozenset({"refusal.bad"}))
    publisher.close()  # afterwards, the publisher declares the queue again
    assert not publisher.sends_to("bad")
    RefusedPublisher.now += publisher_module.REFUSED_QUEUE_REST_S + 0.1
    assert not publisher.sends_to("bad")
    assert publisher.event_names == ["queue.refused", "queue.refused"], (
        "once when it begins, not at each try"
    )


def test_an_unavailable_broker_is_unavailable_for_all_queues(
    publisher: RefusedPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publisher.sends_to("good")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("away")

    monkeypatch.setattr(publisher._link, "_send_one", fail)
    monkeypatch.setattr(broker_module, "bounded_connection", fail)
    assert not publisher.sends_to("good")
    monkeypatch.undo()
    assert not publisher.is_up


def test_a_time_limit_of_the_caller_is_not_a_failure_of_the_broker(
    publisher: RefusedPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publisher.sends_to("good")
    assert publisher.sends_to("good"), "the caller itself sends from now on"

    def strike(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded(5)

    monkeypatch.setattr(publisher._link, "_send_one", strike)
    with pytest.raises(SoftTimeLimitExceeded):
        publisher.sends_to("good")
    monkeypatch.undo()
    assert publisher.is_up
    assert publisher.event_names == []
    assert not publisher._is_sending
    assert not publisher._link.is_open, "it may have been struck in the middle of a message"


@pytest.mark.parametrize(("options", "bound_s"), [({"confirm_publish": True}, 0.5), ({}, 2.0)])
def test_reading_a_confirmation_is_bounded_as_sending_is(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], bound_s: float
) -> None:
    app = Celery("test", broker="amqp://127.0.0.1", set_as_current=False)
    app.conf.broker_transport_options = options
    monkeypatch.setattr(Connection, "ensure_connection", lambda *_, **__: None)
    connection = broker_module.bounded_connection(app, 0.5, connect_step_s=2.0)
    assert connection.transport_options["read_timeout"] == bound_s
