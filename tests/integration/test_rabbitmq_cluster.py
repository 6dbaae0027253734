"""Test RabbitMQ clusters with unreachable queues, and URLs without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from delaytasks.runtime import runtime_of
from tests.running import Deployment
from tests.services import RabbitServer, free_port
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(
    own_rabbitmq: RabbitServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RabbitServer]]:
    """Yield the two nodes of a cluster."""
    second = RabbitServer(tmp_path_factory.mktemp("second"), cluster_of=own_rabbitmq)
    yield [own_rabbitmq, second]
    second.stop()


def test_a_worker_whose_queues_node_is_down_works_from_the_table(
    tmp_path: Path, postgresql_url: str, nodes: list[RabbitServer]
) -> None:
    home, other = nodes
    d = Deployment(tmp_path, postgresql_url, other.url)
    try:
        with Connection(home.url) as connection:
            # A queue stays on the node that declared it.
            runtime_of(d.delays).publisher.queue("default")(connection).declare()
        first = d.worker()
        d.wait_for([d.schedule()])
        home.crash()
        refused: list[str] = []
        d.delays.events.subscribe(
            lambda n, fields: refused.append(fields["remedy"]) if n == "queue.refused" else None
        )
        # A new connection declares the queue again.
        d.delays.close()
        d.wait_for([d.schedule(delay=n / 2) for n in range(4)], deadline_s=10 + d.r1_s() + SLACK_S)
        assert len(refused) == 1
        assert "node of the queue" in refused[0]
        assert "delete" not in refused[0], "it is there again when its node is"

        second = d.begin_worker()
        first.terminate()
        assert first.status == 0
        d.wait_for([d.schedule(delay=n / 2) for n in range(4)], deadline_s=15 + d.r1_s() + SLACK_S)
        assert not second.ended()
        stats = d._start("stats", ["stats", "--json"], program=("delaytasks",))
        wait_until(stats.ended, 30, "the statistics")
        broker = json.loads(stats.log()[stats.log().index("{\n") :])["broker"]
        assert broker["is_up"] is False
        assert "home node" in broker["error"]

        home.start()
        wait_until(lambda: " ready." in second.log(), 30, "the worker to consume")
        wait_until(lambda: _runs_on_time(d), 20, "the fast path to work", every_s=0.2)
    finally:
        if home._process is None:
            home.start()
        d.close()


def _runs_on_time(d: Deployment) -> bool:
    task = d.schedule(delay=0.5)
    d.wait_for([task], deadline_s=30)
    return next(int(run[1]) for run in d.runs() if run[0] == str(task.id)) < 200_000


def test_a_url_without_a_server_does_not_keep_a_worker_from_its_messages(
    tmp_path: Path, postgresql_url: str, rabbitmq_url: str
) -> None:
    nobody = f"amqp://guest:guest@127.0.0.1:{free_port()}//"
    conf: dict[str, Any] = {
        "broker_url": [rabbitmq_url, nobody],
        "task_default_queue_type": "quorum",
    }
    d = Deployment(tmp_path, postgresql_url, rabbitmq_url, conf)
    try:
        worker = d.worker()
        wait_until(
            lambda: "Failed to setup delayed delivery" in worker.log(),
            60,
            "Celery to give that URL up",
        )
        assert worker.log().index(" ready.") < worker.log().index(
            "Failed to setup delayed delivery"
        )
        d.wait_for([d.schedule()])
        assert not worker.ended()
    finally:
        d.close()


def test_messages_are_sent_when_only_the_last_of_three_urls_answers(
    tmp_path: Path, postgresql_url: str, rabbitmq_url: str
) -> None:
    nobody = [f"amqp://guest:guest@127.0.0.1:{free_port()}//" for _ in range(2)]
    d = Deployment(tmp_path, postgresql_url, rabbitmq_url, {"broker_url": [*nobody, rabbitmq_url]})
    try:
        assert runtime_of(d.delays).publisher.send("delaytasks.run", "default", [([[]], {})])
        assert runtime_of(d.delays).producer_timer.is_up
    finally:
        d.close()
