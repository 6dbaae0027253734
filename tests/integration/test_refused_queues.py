"""One command to a broker may put another queue, exchange or key where a worker's is.

Workers stay alive, log what is wrong, run due tasks from the table, and use the queue again when it
is repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment, Process
from tests.services import RabbitServer, RedisServer
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow


def consume_exclusively(channel: Any, name: str) -> None:
    channel.queue_delete(name)
    channel.queue_declare(name, durable=True, auto_delete=False)
    channel.basic_consume(name, exclusive=True, callback=lambda message: None)


def redeclare_exchange(channel: Any, name: str) -> None:
    # Workers must declare both the queue and the exchange again.
    channel.queue_delete(name)
    channel.exchange_delete(name)
    channel.exchange_declare(name, "fanout", durable=True, auto_delete=False)


def goes_on(d: Deployment, worker: Process) -> None:
    d.wait_for([d.schedule(delay=n / 2) for n in range(2)], deadline_s=20 + d.r1_s() + SLACK_S)
    assert not worker.ended(), worker.log()


def told(worker: Process, *parts: str) -> None:
    """Wait until the worker has logged a line about a blocked queue, which contains `parts`."""
    worker.wait_for("queue.blocked", 30)
    found = next(line for line in worker.log().splitlines() if "queue.blocked" in line)
    for part in parts:
        assert part in found


@pytest.mark.parametrize(
    ("command", "code"),
    [(consume_exclusively, "AccessRefused"), (redeclare_exchange, "PreconditionFailed")],
)
def test_a_running_and_a_starting_worker_survive_a_refused_queue(
    deploy: Deploy, rabbitmq_url: str, command: Callable[[Any, str], None], code: str
) -> None:
    d = deploy("postgresql", "rabbitmq")
    name, first = d.queue_name, d.worker()
    # Celery ignores a cancelled consumer in the consumer's first 0.1 s.
    goes_on(d, first)
    with Connection(rabbitmq_url) as connection:
        command(connection.default_channel, name)
        told(first, name, code)
        second = d.begin_worker()
        told(second)
        goes_on(d, first)
        first.terminate()
        assert first.status == 0
        goes_on(d, second)
        assert second.log().count("queue.blocked") <= 2, "it is not told at each try"
    with Connection(rabbitmq_url) as connection:
        connection.default_channel.queue_delete(name)
        connection.default_channel.exchange_delete(name)
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
    told(worker, queue.name, "error=")
    goes_on(d, worker)
    assert worker.log().count("queue.blocked") <= 2, "it is not told at each try"
    own_rabbitmq.ctl("delete_queue", queue.name)
    worker.wait_for("queue.unblocked", 30)
    goes_on(d, worker)


# -- A private Redis whose keys have another type, or that refuses writes --------------------------


def is_used_again(d: Deployment) -> None:
    """Wait until the queue, and not a sweep, delivers a task that is due."""
    wait_until(d.runs_on_time, 35, lambda: f"the queue to be used again\n{d.stacks()}")


def test_workers_survive_and_start_with_keys_that_are_strings(
    deploy: Deploy, start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis()
    conf = {"broker_transport_options": {"global_keyprefix": "shop_"}}
    d = deploy("postgresql", server.url, conf)
    errors: list[str] = []
    d.delays.events.subscribe(
        lambda name, fields: errors.append(fields["error"]) if name == "queue.refused" else None
    )

    def block(key: str) -> None:
        """Atomically replace the list, set or hash at `key` with a string."""
        with server.client() as redis, redis.pipeline() as pipe:
            pipe.delete(key).set(key, "x").execute()

    worker, key = d.worker(concurrency=1), f"shop_{d.queue_name}"
    goes_on(d, worker)
    block(key)
    told(worker, key, "WRONGTYPE")
    goes_on(d, worker)
    assert "WRONGTYPE" in errors[0]
    for kind in ("", "permanent."):
        block(f"shop__kombu.binding.{kind}{d.queue_name}")
    second = d.begin_worker(pool="solo", concurrency=1)
    told(second)
    goes_on(d, second)
    assert worker.log().count("queue.blocked") <= 2, "it is not told at each try"
    server.client().flushall()
    is_used_again(d)
    worker.wait_for("queue.unblocked", 35)
    assert not worker.ended()
    assert not second.ended()


ALLOW_ALL = "ACL SETUSER default on nopass ~* &* +@all"
#: Commands by which Redis refuses writes, and those that repair it.
BREAKS = {
    "eta": {
        "ACL SETUSER default -brpop": ALLOW_ALL,
        "ACL SETUSER default resetkeys ~nothing": ALLOW_ALL,
        "CONFIG SET maxmemory 1": "CONFIG SET maxmemory 0",
    },
    "redis": {
        "ACL SETUSER default -evalsha -zadd": ALLOW_ALL,
        "REPLICAOF 127.0.0.1 1": "REPLICAOF NO ONE",
    },
}


@pytest.mark.parametrize("timer", BREAKS)
def test_a_worker_survives_a_redis_that_refuses_writes(
    deploy: Deploy, start_redis: Callable[..., RedisServer], timer: str
) -> None:
    server = start_redis()
    d = deploy("postgresql", server.url, timer=timer)
    worker = d.worker(concurrency=1)
    for breaks, repairs in BREAKS[timer].items():
        is_used_again(d)
        before = worker.log().count("\n")
        with server.client() as redis:
            redis.execute_command(*breaks.split())
            try:
                goes_on(d, worker)
                assert worker.log().count("\n") < before + 150, worker.log()
            finally:
                redis.execute_command(*repairs.split())
    is_used_again(d)
    assert not worker.ended()
