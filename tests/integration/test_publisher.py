"""Many messages are published together, and each one has its own result."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from delaytasks.broker.link import BrokerLink, Outgoing, UnroutableError
from delaytasks.durable_eta.messages import StoredMessage
from delaytasks.model.clock import Clock
from tests.conftest import closing_all
from tests.services import RabbitServer
from tests.waiting import wait_until

LIMIT_S = 3.0


class Publisher(BrokerLink):
    """A link to a broker, and the queue to which its messages go."""

    def __init__(self, url: str) -> None:
        self.queue = "dt_test_" + secrets.token_hex(4)
        self.app = Celery(self.queue, broker=url, set_as_current=False)
        super().__init__(self.app, LIMIT_S, confirms=True)

    def message(self, number: int, **changes: Any) -> Outgoing:
        headers = {"task": "any", "id": str(number)}
        properties = {"correlation_id": str(number), "delivery_mode": 2, "priority": 0}
        kind, queue = ("application/json", "utf-8"), self.queue
        made = StoredMessage(str(number), *kind, headers, properties, "", queue, queue)
        return made._replace(**changes).outgoing(self.app, Clock())

    def send(self, *messages: int | Outgoing) -> list[Any]:
        made = [self.message(one) if isinstance(one, int) else one for one in messages]
        return self.publish(made)

    def arrived(self, **declared: Any) -> list[int]:
        """Return the numbers of the messages in the queue, which removes them."""
        found = []
        with self.app.connection_for_read() as connection:
            queue = self.app.amqp.queues[self.queue](connection.default_channel)
            queue.queue_arguments = declared or None
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                found.append(message.payload)
        return found

    def delete_queue(self) -> None:
        with self.app.connection_for_write() as connection:
            self.app.amqp.queues[self.queue](connection.default_channel).delete()

    def close(self) -> None:
        super().close()
        self.delete_queue()
        self.app.close()


Make = Callable[[str], Publisher]


@pytest.fixture
def make() -> Iterator[Make]:
    with closing_all(Publisher) as make:
        yield make


@pytest.fixture
def post(make: Make, rabbitmq_url: str) -> Publisher:
    return make(rabbitmq_url)


def test_a_message_that_rabbitmq_refuses_stops_no_other(
    post: Publisher, make: Make, rabbitmq_url: str
) -> None:
    nowhere = post.message(1, exchange="dt_test_no_such_exchange", queue=None)
    lost = post.message(2, routing_key=f"{post.queue}.no_such_queue", queue=None)
    first, no_exchange, unroutable, last = post.send(0, nowhere, lost, 3)
    assert (first, last) == (None, None)
    assert "no exchange" in str(no_exchange)
    assert isinstance(unroutable, UnroutableError)
    assert sorted(set(post.arrived())) == [0, 3]
    numbers = list(range(600))
    assert post.send(*numbers) == [None] * 600
    assert post.arrived() == numbers, "in their order"
    post.delete_queue()
    assert post.send(4, 5) == [None, None], "the link took it for declared, and declares it again"
    assert post.arrived() == [4, 5]
    post.delete_queue()
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    post.app.amqp.queues[post.queue].queue_arguments = full
    assert post.arrived(**full) == []
    assert [type(error).__name__ for error in post.send(6, 7)] == ["NoneType", "MessageNacked"]
    other = make(rabbitmq_url)
    other.app.amqp.queues[other.queue].queue_arguments = full
    results = post.send(8, other.message(1), other.message(2), 9)
    expected = ["MessageNacked", "NoneType", "MessageNacked", "MessageNacked"]
    assert [type(error).__name__ for error in results] == expected


def test_headers_that_rabbitmq_cannot_take_stop_no_other(post: Publisher) -> None:
    assert post.send(0) == [None]
    first, refused, last = post.send(0, post.message(1, headers={"x": "a" * 200_000}), 2)
    assert (first, last) == (None, None)
    assert "the headers have 200,0" in str(refused)
    assert post.arrived() == [0, 0, 2], "none is sent again"


@pytest.mark.slow
def test_while_rabbitmq_blocks_publishers_each_message_is_sent_to_it_once(
    make: Make, own_rabbitmq: RabbitServer
) -> None:
    post = make(own_rabbitmq.url)
    assert post.send(0) == [None]
    own_rabbitmq.alarm(True)
    try:
        for _ in range(3):
            assert "blocks publishers" in str(post.send(1)[0])
    finally:
        own_rabbitmq.alarm(False)
    wait_until(lambda: post.send(2) == [None], 10, "RabbitMQ")
    assert post.arrived() == [0, 1, 2]
