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
from tests.proxy import Proxy
from tests.services import RabbitServer
from tests.waiting import wait_until

LIMIT_S = 3.0


class PublisherHarness:
    """A publisher, and the queue to which its messages go."""

    def __init__(self, url: str) -> None:
        self.queue = "dt_test_" + secrets.token_hex(4)
        self.app = Celery(self.queue, broker=url, set_as_current=False)

        self.publisher = BrokerLink(self.app, LIMIT_S, confirms=True)

    def message(self, number: int, **changes: Any) -> Outgoing:
        headers = {"task": "any", "id": str(number)}
        properties = {"correlation_id": str(number), "delivery_mode": 2, "priority": 0}
        kind, queue = ("application/json", "utf-8"), self.queue
        made = StoredMessage(str(number), *kind, headers, properties, "", queue, queue)
        return made._replace(**changes).outgoing(self.app, Clock())

    def arrived(self) -> list[int]:
        """Return the numbers of the messages in the queue, which removes them."""
        found = []
        with self.app.connection_for_read() as connection:
            queue = self.app.amqp.queues[self.queue](connection.default_channel)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                found.append(message.payload)
        return found

    def close(self) -> None:
        self.publisher.close()
        with self.app.connection_for_write() as connection:
            self.app.amqp.queues[self.queue](connection.default_channel).delete()
        self.app.close()


Make = Callable[[str], PublisherHarness]


@pytest.fixture
def make_post(proxies: list[Proxy]) -> Iterator[Make]:
    """Make publishers, which are closed before the proxies that they use."""
    with closing_all(PublisherHarness) as make:
        yield make


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def test_a_batch_arrives_complete_and_in_its_order(make_post: Make, broker_url: str) -> None:
    post = make_post(broker_url)

    for first in (0, 600):
        numbers = range(first, first + 600)
        assert post.publisher.publish([*map(post.message, numbers)]) == [None] * 600
        assert post.arrived() == [*numbers]


@pytest.fixture
def post(make_post: Make, rabbitmq_url: str) -> PublisherHarness:
    return make_post(rabbitmq_url)


def test_a_message_that_rabbitmq_refuses_stops_no_other(post: PublisherHarness) -> None:
    nowhere = post.message(1, exchange="dt_test_no_such_exchange", queue=None)
    lost = post.message(2, routing_key=f"{post.queue}.no_such_queue", queue=None)
    results = post.publisher.publish([post.message(0), nowhere, lost, post.message(3)])
    assert (results[0], results[3]) == (None, None)
    assert "no exchange" in str(results[1])
    assert isinstance(results[2], UnroutableError)
    assert sorted(set(post.arrived())) == [0, 3]


def test_headers_that_rabbitmq_cannot_take_stop_no_other(post: PublisherHarness) -> None:
    large = post.message(1, headers={"x": "a" * 200_000})
    assert post.publisher.publish([post.message(0)]) == [None]
    results = post.publisher.publish([post.message(0), large, post.message(2)])
    assert (results[0], results[2]) == (None, None)
    assert "the headers have 200,0" in str(results[1])
    assert post.arrived() == [0, 0, 2], "none is sent again"


def test_a_queue_that_was_lost_since_its_declaration_is_declared_by_the_next_call(
    post: PublisherHarness,
) -> None:
    assert post.publisher.publish([post.message(0)]) == [None]
    with post.app.connection_for_write() as connection:
        post.app.amqp.queues[post.queue](connection.default_channel).delete()

    (result,) = post.publisher.publish([post.message(1)])
    assert isinstance(result, UnroutableError)
    assert post.publisher.publish([post.message(1), post.message(2)]) == [None, None]
    assert post.arrived() == [1, 2]


@pytest.mark.slow
def test_while_rabbitmq_blocks_publishers_each_message_is_sent_to_it_once(
    make_post: Make, own_rabbitmq: RabbitServer
) -> None:
    post = make_post(own_rabbitmq.url)
    assert post.publisher.publish([post.message(0)]) == [None]
    own_rabbitmq.alarm(True)
    try:
        for _ in range(3):
            (result,) = post.publisher.publish([post.message(1)])
            assert "blocks publishers" in str(result)
    finally:
        own_rabbitmq.alarm(False)

    wait_until(lambda: post.publisher.publish([post.message(2)]) == [None], 10, "RabbitMQ")
    assert post.arrived() == [0, 1, 2]


def test_a_redis_key_of_another_type_stops_no_other_queue(make_post: Make, redis_url: str) -> None:
    post, other = make_post(redis_url), make_post(redis_url)
    with post.app.connection_for_write() as connection:
        client = connection.default_channel.client
        client.set(other.queue, "text")
        strange = post.message(1, routing_key=other.queue, queue=other.queue)

        results = post.publisher.publish([post.message(0), strange, post.message(2)])
        client.delete(other.queue)

    assert (results[0], results[2]) == (None, None)
    assert "WRONGTYPE" in str(results[1])
    assert sorted(set(post.arrived())) == [0, 2]
