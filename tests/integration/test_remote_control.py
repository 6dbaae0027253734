"""Delayed tasks do not need Celery's remote control, which obeys every client of the broker."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from redis import Redis

from delaytasks import Status
from delaytasks.model.text import installed_version
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


@pytest.mark.slow
def test_celery_inspect_answers_while_a_chunk_runs(
    deploy: Deploy, start_redis: Callable[[], RedisServer]
) -> None:
    """`celery inspect` prints the answer with the JSON encoder of the standard library."""
    d = deploy("postgresql", start_redis().url)
    worker = d.worker(concurrency=1)
    running = d.schedule("test.sleep", body={"seconds": 600})
    wait_until(lambda: d.status(running) is Status.RUNNING, 10, "the sleeper to run")

    def reports() -> list[tuple[int, str]]:
        """Return the busy processes and the version of each worker, as its row has them."""
        return [(worker["busy"], worker["version"]) for worker in d.store.workers.all()]

    wait_until(lambda: reports() == [(1, installed_version())], 10, "the report of its load")
    said = d.command("inspect", "stats", "-d", d.node(0), "-t", "10")
    assert said.status == 0, f"{said.log()}\n{worker.log()}"
    assert re.search(r'"oldest_chunk": "\d{4}-\d\d-\d\dT', said.log())
    assert re.search(r'"chunks": 1\b', said.log())
    assert not worker.ended()


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
