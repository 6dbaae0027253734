"""Delayed tasks do not need Celery's remote control, which obeys every client of the broker."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from redis import Redis

from delaytasks import Status
from delaytasks.runtime import runtime_of
from delaytasks.worker.broker_connection import stop_reading
from tests.running import Deployment, delete_keys
from tests.services import RedisServer
from tests.waiting import wait_until


def test_without_remote_control_tasks_run_and_no_message_shuts_a_worker_down(
    tmp_path: Path, postgresql_url: str, start_redis: Callable[[], RedisServer]
) -> None:
    d = Deployment(
        tmp_path, postgresql_url, start_redis().url, {"worker_enable_remote_control": False}
    )
    try:
        worker, delays = d.worker(ready_s=90), d.delays
        # The test acts as an attacker. A worker that accepts commands would stop before it runs the
        # tasks that are scheduled after the command.
        runtime_of(delays).celery.control.shutdown()
        tasks = [d.schedule(delay=0.2) for _ in range(3)]
        wait_until(
            lambda: {delays.get(task).status for task in tasks} == {Status.DONE},
            60,
            "the tasks to be done",
        )
        assert not worker.ended()
        assert "remote shutdown" not in worker.log()
    finally:
        d.close()


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
        consumer = Consumer(
            self.connection, [self.queue], no_ack=True, on_message=self.taken.append
        )
        consumer.consume()
        self.channel: Any = self.connection.default_channel
        self.connection.transport.cycle._register_BRPOP(self.channel)
        # Celery's own steps cancel the consumer before our step stops.
        consumer.cancel()

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


def test_a_message_delivered_to_a_stopping_worker_returns_to_its_redis_queue(
    place: ConsumingConnection,
) -> None:
    place.publish()
    wait_until(lambda: place.waiting() == 0, 10, "Redis to give it out")
    stop_reading(SimpleNamespace(connection=place.connection))
    assert place.waiting() == 1
    assert place.taken == []


def test_a_worker_that_stopped_reading_gets_no_more_messages(place: ConsumingConnection) -> None:
    stop_reading(SimpleNamespace(connection=place.connection))
    place.publish()
    assert place.waiting() == 1
