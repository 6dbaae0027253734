"""One AMQP command may put another queue or exchange where a worker's is.

Workers stay alive, log what is wrong, run due tasks from the table, and use the queue again when it
is repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from redis import Redis

from delaytasks import DelayedTask
from delaytasks.runtime import runtime_of
from tests.running import QUICK, Deployment, Process
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


@pytest.fixture
def deployment(tmp_path: Path, postgresql_url: str, rabbitmq_url: str) -> Iterator[Deployment]:
    d = Deployment(tmp_path, postgresql_url, rabbitmq_url)
    yield d
    d.close()


def goes_on(d: Deployment, worker: Process) -> None:
    d.wait_for([d.schedule(delay=n / 2) for n in range(2)], deadline_s=20 + d.r1_s() + SLACK_S)
    assert not worker.ended()


@pytest.mark.parametrize(
    ("command", "code"), [(redeclare, 406), (consume_exclusively, 403), (redeclare_exchange, 406)]
)
def test_a_running_and_a_starting_worker_survive_a_refused_queue(
    deployment: Deployment, rabbitmq_url: str, command: Command, code: int
) -> None:
    d = deployment
    first = d.worker()
    # Celery ignores a cancelled consumer in the consumer's first 0.1 s.
    goes_on(d, first)
    name = runtime_of(d.delays).publisher.queue("default").name
    with Connection(rabbitmq_url) as connection:
        command(connection.default_channel, name)
        wait_until(lambda: "queue.blocked" in first.log(), 20, lambda: first.log())
        line = next(line for line in first.log().splitlines() if "queue.blocked" in line)
        assert f"key={name!r}" in line
        assert f"code={code}" in line
        assert "remedy=" in line
        second = d.begin_worker()
        wait_until(lambda: "queue.blocked" in second.log(), 30, lambda: second.log())
        goes_on(d, first)
        first.terminate()
        assert first.status == 0
        goes_on(d, second)
        assert second.log().count("queue.blocked") <= 2, "it is not told at each try"
    with Connection(rabbitmq_url) as connection:
        delete(connection.default_channel, name)
    wait_until(lambda: "queue.unblocked" in second.log(), 20, lambda: second.log())
    goes_on(d, second)


def test_workers_run_tasks_while_a_quorum_queue_does_not_answer(
    tmp_path: Path, postgresql_url: str, own_rabbitmq: RabbitServer
) -> None:
    d = Deployment(
        tmp_path, postgresql_url, own_rabbitmq.url, {"task_default_queue_type": "quorum"}
    )
    queue = runtime_of(d.delays).publisher.queue("default")
    try:
        with Connection(own_rabbitmq.url) as connection:
            queue(connection).declare()
        own_rabbitmq.crash()  # before RabbitMQ has stored the queue, which stays without a leader
        own_rabbitmq.start()
        worker = d.begin_worker()
        wait_until(lambda: "queue.blocked" in worker.log(), 30, lambda: worker.log())
        line = next(line for line in worker.log().splitlines() if "queue.blocked" in line)
        assert queue.name in line
        assert "remedy='at least one of these queues does not answer" in line
        goes_on(d, worker)
        assert worker.log().count("queue.blocked") <= 2, "it is not told at each try"
        own_rabbitmq.ctl("delete_queue", queue.name)
        wait_until(lambda: "queue.unblocked" in worker.log(), 30, lambda: worker.log())
        goes_on(d, worker)
    finally:
        d.close()


# -- A command to a Redis broker can replace a queue with a key of another type -------------------

# Workers stay alive, log the names of their queues, run due tasks from the table, and use the
# queues again after the key is repaired.


#: A worker tries a blocked queue again after at most this many seconds.
RETRY_S = 5


class RedisDeployment:
    """Run a deployment on a Redis server that only this test uses."""

    def __init__(self, folder: Path, database: str, server: RedisServer, **settings: Any) -> None:
        self.server = server
        self.redis: Redis = server.client()
        self.d = Deployment(folder, database, server.url, **settings)
        self.queue = runtime_of(self.d.delays).publisher.queue("default").name

    def block(self, key: str) -> None:
        """Atomically replace the list, set or hash at `key` with a string."""
        with self.redis.pipeline() as pipe:
            pipe.delete(key).set(key, "x").execute()  # type: ignore[attr-defined]

    def worker(self, *options: str, **more: Any) -> Process:
        return self.d.worker(*options, concurrency=1, **more)

    def run_soon(self, count: int = 3) -> list[DelayedTask]:
        tasks = [self.d.schedule(delay=0.3) for _ in range(count)]
        self.d.wait_for(tasks, deadline_s=20)
        return tasks

    def lateness_s(self, task: DelayedTask) -> float:
        """Return how many seconds after its due time the task ran, as the task measured it."""
        found = next(run for run in self.d.runs() if run[0] == str(task.id))
        return int(found[1]) / 1e6

    def wait_until_on_time(self) -> None:
        """Wait until the broker, and not a sweep, delivers a task that is due."""

        def is_on_time() -> bool:
            [task] = self.run_soon(1)
            return self.lateness_s(task) < float(QUICK["_grace_s"])

        wait_until(
            is_on_time, RETRY_S + 30, lambda: f"the queue to be used again\n{self.d.stacks()}"
        )

    def close(self) -> None:
        self.redis.flushall()
        self.d.close()
        self.redis.close()


Open = Callable[..., RedisDeployment]


@pytest.fixture
def open_broker(
    tmp_path: Path, postgresql_url: str, start_redis: Callable[..., RedisServer]
) -> Iterator[Open]:
    made: list[RedisDeployment] = []

    def make(*options: str, **settings: Any) -> RedisDeployment:
        made.append(RedisDeployment(tmp_path, postgresql_url, start_redis(*options), **settings))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_survives_a_queue_whose_key_is_a_string(open_broker: Open, pool: str) -> None:
    broker = open_broker()
    worker = broker.worker(pool=pool)
    broker.run_soon()
    broker.block(broker.queue)
    wait_until(
        lambda: "queue.blocked" in worker.log(),
        10 + SLACK_S,
        lambda: f"it to be told\n{broker.d.logs()}",
    )
    broker.run_soon()
    assert not worker.ended(), worker.log()
    line = next(line for line in worker.log().splitlines() if "queue.blocked" in line)
    assert broker.queue in line
    assert "WRONGTYPE" in line
    assert "remedy=" in line
    assert worker.log().count("queue.blocked") <= 2, "it is not told at each try"
    broker.redis.delete(broker.queue)
    broker.wait_until_on_time()
    assert "queue.unblocked" in worker.log()
    assert not worker.ended()


def test_a_worker_starts_where_a_queues_key_is_a_string(open_broker: Open) -> None:
    broker = open_broker()
    for key in (
        broker.queue,
        f"_kombu.binding.{broker.queue}",
        f"_kombu.binding.permanent.{broker.queue}",
    ):
        broker.block(key)
    worker = broker.d.begin_worker()
    broker.run_soon()
    assert "queue.blocked" in worker.log()
    broker.redis.flushall()
    broker.wait_until_on_time()
    assert not worker.ended()


TIMERS = ("eta", "redis")
ALLOW_ALL = "ACL SETUSER default on nopass ~* &* +@all"


@pytest.mark.parametrize(
    ("timer", "breaks", "mends"),
    [
        ("eta", "ACL SETUSER default -brpop -lpush -llen", ALLOW_ALL),
        ("eta", "ACL SETUSER default -brpop", ALLOW_ALL),
        ("eta", "ACL SETUSER default resetkeys ~nothing", ALLOW_ALL),
        ("redis", "ACL SETUSER default -evalsha -zadd", ALLOW_ALL),
        *((timer, "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0") for timer in TIMERS),
        *((timer, "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE") for timer in TIMERS),
    ],
)
def test_a_worker_survives_a_redis_that_refuses_writes(
    open_broker: Open, timer: str, breaks: str, mends: str
) -> None:
    """Redis refuses writes: no rights, no memory, or it is a read-only replica."""
    broker = open_broker(timer=timer)
    worker = broker.worker()
    broker.run_soon()
    broker.redis.execute_command(*breaks.split())
    try:
        broker.run_soon()
        assert not worker.ended(), worker.log()
        assert worker.log().count("\n") < 150, worker.log()
    finally:
        broker.redis.execute_command(*mends.split())
    broker.wait_until_on_time()
    assert not worker.ended()


def test_a_worker_starts_where_the_redis_timers_keys_are_strings(open_broker: Open) -> None:
    broker = open_broker(timer="redis")
    timer = runtime_of(broker.d.delays).redis_timer
    assert timer is not None
    for slot in timer.slots("default"):
        for key in timer.keys(slot):
            broker.block(key)
    worker = broker.worker()
    broker.run_soon()
    assert "timer.blocked" in worker.log()
    broker.redis.flushall()
    broker.wait_until_on_time()
    assert not worker.ended()


# -- With `global_keyprefix` the log names the keys that an operator finds in Redis ---------------


def test_a_blocked_key_is_logged_with_its_prefix(
    tmp_path: Path, postgresql_url: str, start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis()
    options = {"broker_transport_options": {"global_keyprefix": "shop_"}}
    d = Deployment(tmp_path, postgresql_url, server.url, options)
    key = "shop_" + runtime_of(d.delays).publisher.queue("default").name
    try:
        worker = d.worker(concurrency=1)
        with server.client() as redis:
            redis.delete(key)
            redis.set(key, "x")
            wait_until(lambda: "queue.blocked" in worker.log(), 10 + SLACK_S, worker.log)
            assert key in worker.log()
            redis.delete(key)
        wait_until(lambda: "queue.unblocked" in worker.log(), 10 + SLACK_S, worker.log)
    finally:
        d.close()
