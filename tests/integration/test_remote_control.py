"""Delayed tasks do not need Celery's remote control, which obeys every client of the broker."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from redis import Redis

from delaytasks.runtime import runtime_of
from delaytasks.worker.patches import stop_reading
from tests.integration.conftest import Deploy
from tests.running import delete_keys
from tests.services import RedisServer
from tests.waiting import wait_until


def test_without_remote_control_tasks_run_and_no_message_shuts_a_worker_down(
    deploy: Deploy, start_redis: Callable[[], RedisServer]
) -> None:
    d = deploy("postgresql", start_redis().url, {"worker_enable_remote_control": False})
    worker = d.worker(ready_s=90)
    # The test acts as an attacker. A worker that accepts commands would stop before it runs the
    # tasks that are scheduled after the command.
    runtime_of(d.delays).celery.control.shutdown()
    d.wait_for([d.schedule(delay=0.2) for _ in range(3)], deadline_s=60)
    assert not worker.ended()
    assert "remote shutdown" not in worker.log()


# -- test hanging up ------------------------------------------------------------------------------

# A worker that stops on Redis has already requested one more message, which must not be lost.


class ConsumingConnection:
    """Consume like a worker, with a request for the next message under way."""

    def __init__(self, url: str) -> None:
        self.name = "t" + secrets.token_hex(4)
        self.taken: list[Any] = []
        self.redis = Redis.from_url(url)
        self.connection = Connection(url)
        self.queue = Queue(self.name, no_ack=True)
        reader = Consumer(self.connection, [self.queue], no_ack=True, on_message=self.taken.append)
        reader.consume()
        self.channel: Any = self.connection.default_channel
        self.connection.transport.cycle._register_BRPOP(self.channel)
        # Celery's own steps cancel the consumer before our step stops.
        reader.cancel()

    def publish(self) -> None:
        with Connection(self.connection.as_uri(include_password=True)) as other:
            other.Producer().publish({"n": 1}, routing_key=self.name)

    def waiting(self) -> int:
        found: int = self.redis.llen(self.name)
        return found


@pytest.fixture
def place(redis_url: str) -> Iterator[ConsumingConnection]:
    made = ConsumingConnection(redis_url)
    yield made
    with Connection(redis_url) as connection:
        delete_keys(connection, made.name)
    made.connection.release()
    made.redis.close()


def test_a_message_of_a_stopping_worker_returns_to_redis(place: ConsumingConnection) -> None:
    place.publish()
    wait_until(lambda: place.waiting() == 0, 10, "Redis to give it out")
    stop_reading(SimpleNamespace(connection=place.connection))
    assert place.waiting() == 1
    assert place.taken == []

    place.publish()
    assert place.waiting() == 2, "a worker that stopped reading gets no more messages"
