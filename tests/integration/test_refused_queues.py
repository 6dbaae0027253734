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

from delaytasks.runtime import runtime_of
from tests.running import Deployment, Process
from tests.services import RabbitServer
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
