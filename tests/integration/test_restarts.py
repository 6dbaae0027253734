"""Test brokers that restart repeatedly under workers.

A Redis server loses its data at each restart, for each timer. A RabbitMQ server takes seconds to
start, and loses its data at every second restart.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from kombu import Connection

from delaytasks import Status
from delaytasks.broker.link import QueueAwayError
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.integration.test_publisher import Publisher
from tests.running import Deployment, Process
from tests.services import RabbitServer, RedisServer
from tests.waiting import IS_LONG, SLACK_S, wait_until

pytestmark = pytest.mark.slow

ROUNDS = 20 if IS_LONG else 8
#: RabbitMQ restarts fewer times, since its restarts take many seconds.
RABBITMQ_ROUNDS = 20 if IS_LONG else 3
RESUMES_S = 10
#: After this many seconds a new quorum queue survives a crash of its only node. A younger one does
#: not answer any more, at least in RabbitMQ 3.10; see `test_refused_queues.py`.
QUORUM_QUEUE_STORED_S = 3
NOBODY = "amqp://guest:guest@127.0.0.1:1//"


def each_runs_once(
    deployments: list[Deployment], restart: Callable[[int], object], rounds: int
) -> list[Process]:
    """Restart the broker of workers, which run all tasks once, and in time soon after it."""
    workers = [d.worker() for d in deployments]

    def schedule(*delays: float) -> None:
        for d in deployments:
            for delay in delays:
                d.schedule(delay=delay)

    schedule(*(n / 2 for n in range(20)))
    for number in range(rounds):
        schedule(*[0.2] * 5)
        restart(number)
        for d in deployments:
            wait_until(d.runs_on_time, RESUMES_S, "a task to be in time", every_s=0.2)
    for d in deployments:
        wait_until(lambda d=d: d.counted()[Status.DONE] == sum(d.counted().values()), 20, d.logs)  # type: ignore[misc]
        runs = [run[0] for run in d.runs()]
        assert len(runs) == len(set(runs)) == d.counted()[Status.DONE], "no task runs twice"
    assert not any(worker.ended() for worker in workers)
    return workers


def test_workers_resume_whenever_redis_is_restarted(
    deploy: Deploy, start_redis: Callable[[], RedisServer]
) -> None:
    server = start_redis()
    both = [deploy("postgresql", server.url, folder=it, timer=it) for it in ("eta", "redis")]
    worker, _ = each_runs_once(both, lambda _: server.restart(), ROUNDS)

    def pauses() -> list[str]:
        return re.findall(r"Trying again in (\d+)", worker.log())

    server.stop()
    most = len(pauses()) + 3
    wait_until(lambda: len(pauses()) >= most, 30, "three tries to connect", every_s=0.2)
    assert {*pauses()} == {"4"}, "Celery's own pauses grow with each try"
    server.start()


def test_workers_resume_each_time_their_rabbitmq_is_restarted(
    deploy: Deploy, own_rabbitmq: RabbitServer
) -> None:
    both = [
        deploy("postgresql", own_rabbitmq.url, {"task_default_queue_type": kind}, folder=kind)
        for kind in ("classic", "quorum")
    ]

    def restart(number: int) -> None:
        time.sleep(QUORUM_QUEUE_STORED_S)
        own_rabbitmq.crash()
        for d in both:
            d.schedule(delay=0.2)
        own_rabbitmq.start(is_empty=number % 2 == 1)

    each_runs_once(both, restart, RABBITMQ_ROUNDS)


# -- Test RabbitMQ clusters with unreachable queues, and URLs without a server --------------------


@pytest.fixture
def other(own_rabbitmq: RabbitServer, tmp_path_factory: Any) -> Iterator[RabbitServer]:
    """Yield the other node of a cluster."""
    second = RabbitServer(tmp_path_factory.mktemp("second"), cluster_of=own_rabbitmq)
    yield second
    second.stop()


def test_a_worker_whose_queues_node_is_down_works_from_the_table(
    own_rabbitmq: RabbitServer, other: RabbitServer, deploy: Deploy, request: pytest.FixtureRequest
) -> None:
    home = own_rabbitmq
    d = deploy("postgresql", other.url)
    with Connection(home.url) as connection:
        # A queue stays on the node that declared it.
        runtime_of(d.delays).publisher.queue("default")(connection).declare()
    first = d.worker()
    d.wait_for([d.schedule()])
    home.crash()
    request.addfinalizer(lambda: home.start() if home._process is None else None)
    refused: list[str] = []
    d.delays.events.subscribe(
        lambda n, fields: refused.append(fields["error"]) if n == "queue.refused" else None
    )
    # A new connection declares the queue again.
    d.delays.close()
    d.wait_for([d.schedule(delay=n / 2) for n in range(4)], deadline_s=10 + d.r1_s() + SLACK_S)
    assert len(refused) == 1
    assert "home node" in refused[0]

    second = d.begin_worker()
    first.terminate()
    assert first.status == 0
    d.wait_for([d.schedule(delay=n / 2) for n in range(4)], deadline_s=15 + d.r1_s() + SLACK_S)
    assert not second.ended()

    home.start()
    second.wait_for(" ready.", 30)
    wait_until(d.runs_on_time, 20, "the fast path to work", every_s=0.2)


def test_a_message_whose_declared_queue_is_on_a_dead_node_meets_an_outage(
    own_rabbitmq: RabbitServer, other: RabbitServer, request: pytest.FixtureRequest
) -> None:
    home, posts = own_rabbitmq, [Publisher(other.url), Publisher(other.url)]
    for post in posts:
        request.addfinalizer(post.close)
        with Connection(home.url) as connection:
            post.app.amqp.queues[post.queue](connection.default_channel).declare()
        assert post.send(0) == [None]
    home.crash()
    request.addfinalizer(home.start)
    # RabbitMQ refuses a message that meets the crash, and returns a later one.
    for post in posts:
        [result] = post.send(1)
        assert isinstance(result, QueueAwayError)
        assert "home node" in str(result)


@pytest.mark.skipif(celery.__version__ == "5.5.0", reason="Celery 5.5.0 fails with a list of URLs")
def test_a_url_without_a_server_keeps_no_worker_idle(deploy: Deploy, rabbitmq_url: str) -> None:
    conf = {"broker_url": [rabbitmq_url, NOBODY], "task_default_queue_type": "quorum"}
    d = deploy("postgresql", "rabbitmq", conf)
    worker = d.worker()
    given_up = "Failed to setup delayed delivery"
    worker.wait_for(given_up, 60)
    assert worker.log().index(" ready.") < worker.log().index(given_up)
    d.wait_for([d.schedule()])
    assert not worker.ended()


def test_messages_are_sent_when_the_last_of_3_urls_works(deploy: Deploy, rabbitmq_url: str) -> None:
    d = deploy("postgresql", "rabbitmq", {"broker_url": [NOBODY, NOBODY, rabbitmq_url]})
    assert runtime_of(d.delays).publisher.send("default", [([[]], {})])
    assert d.timer_is_up


# -- Workers and producers reach RabbitMQ through TLS only ----------------------------------------


def test_tasks_run_in_time_over_amqps_and_a_client_without_the_certificate_sends_none(
    amqps: dict[str, Any], deploy: Deploy
) -> None:
    slow = {"sweep": 30, "_self_sweep_s": 60, "_grace_s": 20, "horizon": 90}
    d = deploy("postgresql", amqps["broker_url"], amqps, **slow)
    d.worker()
    task = d.schedule(delay=0.5)
    # The deadline is shorter than the sweep interval, so no sweep armed the task.
    d.wait_for([task], deadline_s=10)
    assert d.delays.events.counts["timer.down"] == 0
    d.conf = {**d.conf, "broker_use_ssl": {"cert_reqs": 2, "server_hostname": "localhost"}}
    distrusting = d.producer()
    distrusting.schedule_delay("test.note", {"file": str(d.file)}, 5)
    wait_until(lambda: distrusting.events.counts["timer.down"], 10, "the refusal")
    distrusting.close()
