"""One AMQP command may put another queue or exchange where a worker's is.

Workers stay alive, log what is wrong, run due tasks from the table, and use the queue again when it
is repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection
from redis import Redis

from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment, Process
from tests.services import RabbitServer, RedisServer
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow

Command = Callable[[Any, str], None]


def redeclare(channel: Any, name: str) -> None:
    channel.queue_delete(name)
    channel.queue_declare(name, durable=True, auto_delete=False, arguments={"x-max-length": 5})


def consume_exclusively(channel: Any, name: str) -> None:
    channel.queue_delete(name)
    channel.queue_declare(name, durable=True, auto_delete=False)
    channel.basic_consume(name, exclusive=True, callback=lambda message: None)


def redeclare_exchange(channel: Any, name: str) -> None:
    # Workers must declare both the queue and the exchange again.
    channel.queue_delete(name)
    channel.exchange_delete(name)
    channel.exchange_declare(name, "fanout", durable=True, auto_delete=False)


def delete(channel: Any, name: str) -> None:
    channel.queue_delete(name)
    channel.exchange_delete(name)


def goes_on(d: Deployment, worker: Process) -> None:
    d.wait_for([d.schedule(delay=n / 2) for n in range(2)], deadline_s=20 + d.r1_s() + SLACK_S)
    assert not worker.ended()


def told(worker: Process) -> str:
    """Return the line about a blocked queue as soon as the worker has logged it."""
    worker.wait_for("queue.blocked", 30)
    return next(line for line in worker.log().splitlines() if "queue.blocked" in line)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (redeclare, "PreconditionFailed"),
        (consume_exclusively, "AccessRefused"),
        (redeclare_exchange, "PreconditionFailed"),
    ],
)
def test_a_running_and_a_starting_worker_survive_a_refused_queue(
    deploy: Deploy, rabbitmq_url: str, command: Command, code: str
) -> None:
    d = deploy("postgresql", "rabbitmq")
    first = d.worker()
    # Celery ignores a cancelled consumer in the consumer's first 0.1 s.
    goes_on(d, first)
    name = d.queue_name
    with Connection(rabbitmq_url) as connection:
        command(connection.default_channel, name)
        for part in (name, code):
            assert part in told(first)
        second = d.begin_worker()
        told(second)
        goes_on(d, first)
        first.terminate()
        assert first.status == 0
        goes_on(d, second)
        assert second.log().count("queue.blocked") <= 2, "it is not told at each try"
    with Connection(rabbitmq_url) as connection:
        delete(connection.default_channel, name)
    second.wait_for("queue.unblocked")
    goes_on(d, second)


def test_workers_run_tasks_while_a_quorum_queue_does_not_answer(
    deploy: Deploy, own_rabbitmq: RabbitServer
) -> None:
    d = deploy("postgresql", own_rabbitmq.url, {"task_default_queue_type": "quorum"})
    queue = runtime_of(d.delays).publisher.queue("default")
    with Connection(own_rabbitmq.url) as connection:
        queue(connection).declare()
    own_rabbitmq.crash()  # before RabbitMQ has stored the queue, which stays without a leader
    own_rabbitmq.start()
    worker = d.begin_worker()
    for part in (queue.name, "error="):
        assert part in told(worker)
    goes_on(d, worker)
    assert worker.log().count("queue.blocked") <= 2, "it is not told at each try"
    own_rabbitmq.ctl("delete_queue", queue.name)
    worker.wait_for("queue.unblocked", 30)
    goes_on(d, worker)


# -- A command to a Redis broker can replace a queue with a key of another type -------------------

# Workers stay alive, log the names of their queues, run due tasks from the table, and use the
# queues again after the key is repaired.


class OwnRedis(Deployment):
    """A deployment on a Redis server that only this test uses."""

    def redis(self) -> Redis:
        return Redis.from_url(self.conf["broker_url"])

    def block(self, key: str) -> None:
        """Atomically replace the list, set or hash at `key` with a string."""
        with self.redis() as redis, redis.pipeline() as pipe:
            pipe.delete(key).set(key, "x").execute()

    def mend(self) -> None:
        """Empty the server, and wait until it, and not a sweep, delivers a task that is due."""
        with self.redis() as redis:
            redis.flushall()
        wait_until(self.runs_on_time, 35, lambda: f"the queue to be used again\n{self.stacks()}")

    def run_soon(self) -> None:
        self.wait_for([self.schedule(delay=0.3) for _ in range(3)])

    def close(self) -> None:
        with self.redis() as redis:
            redis.flushall()
        super().close()


Open = Callable[..., OwnRedis]


@pytest.fixture
def open_broker(deploy: Deploy, start_redis: Callable[..., RedisServer]) -> Open:
    return lambda **settings: deploy("postgresql", start_redis().url, kind=OwnRedis, **settings)


@pytest.mark.parametrize(("pool", "prefix"), [("prefork", ""), ("solo", "shop_")])
def test_workers_survive_and_start_with_keys_that_are_strings(
    open_broker: Open, pool: str, prefix: str
) -> None:
    d = open_broker(conf={"broker_transport_options": {"global_keyprefix": prefix}})
    worker = d.worker(pool=pool, concurrency=1)
    d.run_soon()
    errors: list[str] = []
    d.delays.events.subscribe(
        lambda name, fields: errors.append(fields["error"]) if name == "queue.refused" else None
    )
    key = prefix + d.queue_name
    d.block(key)
    for part in (key, "WRONGTYPE"):
        assert part in told(worker)
    d.run_soon()
    assert "WRONGTYPE" in errors[0]
    for kind in ("", "permanent."):
        d.block(f"{prefix}_kombu.binding.{kind}{d.queue_name}")
    second = d.begin_worker(pool=pool, concurrency=1)
    told(second)
    d.run_soon()
    assert worker.log().count("queue.blocked") <= 2, "it is not told at each try"
    d.mend()
    worker.wait_for("queue.unblocked", 35)
    assert not worker.ended()
    assert not second.ended()


ALLOW_ALL = "ACL SETUSER default on nopass ~* &* +@all"


@pytest.mark.parametrize(
    ("timer", "breaks", "mends"),
    [
        ("eta", "ACL SETUSER default -brpop", ALLOW_ALL),
        ("eta", "ACL SETUSER default resetkeys ~nothing", ALLOW_ALL),
        ("redis", "ACL SETUSER default -evalsha -zadd", ALLOW_ALL),
        ("eta", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("redis", "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    ],
)
def test_a_worker_survives_a_redis_that_refuses_writes(
    open_broker: Open, timer: str, breaks: str, mends: str
) -> None:
    """Redis refuses writes: no rights, no memory, or it is a read-only replica."""
    d = open_broker(timer=timer)
    worker = d.worker(concurrency=1)
    d.run_soon()
    with d.redis() as redis:
        redis.execute_command(*breaks.split())
        try:
            d.run_soon()
            assert not worker.ended(), worker.log()
            assert worker.log().count("\n") < 150, worker.log()
        finally:
            redis.execute_command(*mends.split())
    wait_until(d.runs_on_time, 35, lambda: f"the queue to be used again\n{d.stacks()}")
    assert not worker.ended()
