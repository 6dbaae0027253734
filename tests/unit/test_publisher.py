"""What one queue's refusal does to the others: nothing. On a broker in memory."""

from __future__ import annotations

from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from kombu.connection import Connection
from kombu.entity import Queue

from delaytasks.core import availability
from delaytasks.core.events import Events
from delaytasks.timers import broker_link as broker_module
from delaytasks.timers import publisher as publisher_module
from delaytasks.timers.publisher import Publisher

MESSAGE: list[tuple[list[Any], dict[str, Any]]] = [([[]], {})]


class Refused(Queue):
    """As RabbitMQ answers when a queue is there with other arguments."""

    def declare(self, *arguments: Any, **options: Any) -> Any:
        if self.routing_key in WorkerRuntime.refused:
            raise PreconditionFailed("inequivalent arg 'x-queue-type'")
        return super().declare(*arguments, **options)


class WorkerRuntime(Publisher):
    """Whose broker refuses some queues."""

    refused: frozenset[str] = frozenset()
    now = 1000.0

    def __init__(self) -> None:
        app = Celery("test", broker="memory://", set_as_current=False)
        self.told: list[tuple[str, dict[str, Any]]] = []
        events = Events()
        events.subscribe(lambda name, fields: self.told.append((name, fields)))
        super().__init__(app, "refusal", 0.5, events)

    def queue(self, name: str) -> Queue:
        queue = super().queue(name)
        return Refused(queue.name, queue.exchange, routing_key=queue.routing_key)

    def sends_to(self, queue: str) -> bool:
        return self.send("delaytasks.run", queue, MESSAGE)

    @property
    def events_told(self) -> list[str]:
        return [name for name, _ in self.told]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> WorkerRuntime:
    monkeypatch.setattr(WorkerRuntime, "refused", frozenset({"refusal.bad"}))
    monkeypatch.setattr(WorkerRuntime, "now", 1000.0)
    for module in (publisher_module, broker_module, availability):
        monkeypatch.setattr(module, "monotonic", lambda: WorkerRuntime.now)
    return WorkerRuntime()


def test_a_refused_queue_rests_alone(runtime: WorkerRuntime) -> None:
    assert not runtime.sends_to("bad")
    assert runtime.sends_to("good")
    assert runtime.is_up
    assert runtime.events_told == ["queue.refused"]
    [(_, fields)] = runtime.told
    assert fields["queue"] == "bad"
    assert "x-queue-type" in fields["error"]
    assert "refusal.bad" in fields["remedy"]


def test_a_refused_queue_is_tried_again_after_its_rest_and_told_once(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not runtime.sends_to("bad")
    monkeypatch.setattr(WorkerRuntime, "refused", frozenset[str]())
    assert not runtime.sends_to("bad"), "it rests"
    WorkerRuntime.now += publisher_module.REFUSED_QUEUE_REST_S + 0.1
    assert runtime.sends_to("bad")
    monkeypatch.setattr(WorkerRuntime, "refused", frozenset({"refusal.bad"}))
    runtime.close()  # so that it is declared again
    assert not runtime.sends_to("bad")
    WorkerRuntime.now += publisher_module.REFUSED_QUEUE_REST_S + 0.1
    assert not runtime.sends_to("bad")
    assert runtime.events_told == ["queue.refused", "queue.refused"], (
        "once when it begins, not at each try"
    )


def test_a_broker_that_refuses_a_queue_is_there(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            broker_module,
            "bounded_connection",
            lambda *_, **__: (_ for _ in ()).throw(OSError("away")),
        )
        assert not runtime.sends_to("bad")
    assert not runtime.is_up
    WorkerRuntime.now += availability.REST_S + 0.1
    assert not runtime.sends_to("bad")
    assert runtime.is_up
    assert runtime.events_told == ["timer.down", "timer.up", "queue.refused"]


def test_a_broker_that_is_away_is_away_for_all_queues(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runtime.sends_to("good")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("away")

    monkeypatch.setattr(runtime._link, "_send_one", fail)
    monkeypatch.setattr(broker_module, "bounded_connection", fail)
    assert not runtime.sends_to("good")
    monkeypatch.undo()
    assert not runtime.is_up


def test_the_callers_time_limit_is_the_callers_and_not_the_brokers(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runtime.sends_to("good")
    assert runtime.sends_to("good"), "the caller itself sends from now on"

    def strike(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded(5)

    monkeypatch.setattr(runtime._link, "_send_one", strike)
    with pytest.raises(SoftTimeLimitExceeded):
        runtime.sends_to("good")
    monkeypatch.undo()
    assert runtime.is_up
    assert runtime.events_told == []
    assert not runtime._is_sending
    assert not runtime._link.is_open, "it may have been struck in the middle of a message"


@pytest.mark.parametrize(("options", "bound_s"), [({"confirm_publish": True}, 0.5), ({}, 2.0)])
def test_reading_a_confirmation_is_bounded_as_sending_is(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], bound_s: float
) -> None:
    app = Celery("test", broker="amqp://127.0.0.1", set_as_current=False)
    app.conf.broker_transport_options = options
    monkeypatch.setattr(Connection, "ensure_connection", lambda *_, **__: None)
    connection = broker_module.bounded_connection(app, 0.5, connect_step_s=2.0)
    assert connection.transport_options["read_timeout"] == bound_s
