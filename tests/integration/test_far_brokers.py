"""Test healthy brokers with a slow network: messages arrive, and callers wait within the limit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery
from kombu import Connection

from delaytasks.broker.arming import EtaTimer, Publisher, Sender
from delaytasks.events import Events
from delaytasks.model.clock import Clock
from delaytasks.model.task import Entry
from tests.integration.conftest import Deploy
from tests.integration.outages.conftest import BROKERS, LIMIT_S, SLACK_S
from tests.proxy import Proxy, proxy_to
from tests.running import ROOT, delete_keys
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: The proxy delays each direction by this many seconds, so a round trip takes 0.1 s.
DELAY_S = 0.05
#: This is longer than the dozen round trips of a new connection.
CONNECTED_S = 10
THREADS, EACH = 16, 5


class Far:
    """Run a timer that reaches its broker through a proxy."""

    def __init__(self, url: str) -> None:
        self.proxy = proxy_to(url)
        self.proxy.delay_s = DELAY_S
        self.url = url
        self.namespace = f"far{id(self):x}"
        self.events = Events()
        app = Celery("producer", broker=self.proxy.url(url), set_as_current=False)
        self.publisher = Publisher(app, self.namespace, LIMIT_S, self.events)
        self.timer = Sender(EtaTimer(self.publisher, Clock()), Clock(), LIMIT_S)
        self._arrived = 0

    def send(self) -> tuple[bool, float]:
        """Return whether an entry was armed, and how many seconds the call took."""
        began = time.monotonic()
        is_armed = self.timer.arm([Entry(1, 0, 0)])
        return is_armed, time.monotonic() - began

    def arrived(self) -> int:
        """Return the number of entries that have arrived."""
        with Connection(self.url) as connection:
            queue = self.publisher.queue("default")(connection)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                self._arrived += len(message.payload[0][0])
        return self._arrived

    def close(self) -> None:
        self.proxy.heal()
        self.timer.close()
        self.publisher.close()
        with Connection(self.url) as connection:
            queue = self.publisher.queue("default")(connection)
            queue.delete()
            queue.exchange.delete()
            delete_keys(connection, self.namespace)
        self.proxy.close()


@pytest.fixture
def far(broker: str, request: pytest.FixtureRequest) -> Iterator[Far]:
    made = Far(request.getfixturevalue(f"{broker}_url"))
    yield made
    made.close()


@BROKERS
def test_many_threads_reach_a_distant_broker_without_and_with_a_connection(far: Far) -> None:
    def send_all() -> list[bool]:
        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(lambda _: far.send(), range(THREADS * EACH)))
        assert max(took for _, took in answers) < LIMIT_S + SLACK_S, "connecting takes longer"
        return [is_sent for is_sent, _ in answers]

    send_all()
    wait_until(lambda: far.arrived() == THREADS * EACH, CONNECTED_S, "all messages")
    assert far.proxy.accepted <= 2, "one connection of ours; Kombu opens a second one for Redis"
    wait_until(lambda: far.timer.is_up, 5, "the timer to know")
    assert all(send_all())
    wait_until(lambda: far.arrived() == 2 * THREADS * EACH, 5, "all messages")
    assert far.events.counts["timer.down"] == 0


@BROKERS
def test_a_connection_that_was_closed_while_idle_loses_no_message(far: Far) -> None:
    far.proxy.delay_s = 0
    far.send()
    wait_until(lambda: far.arrived() == 1, 5, "the first message")
    wait_until(lambda: far.timer.is_up, 5, "the timer to know")
    far.proxy.reset()
    # The first write to a connection that was just closed does not fail yet.
    if far.url.startswith("amqp"):
        far.send()
    already = far.arrived()
    assert far.send()[0]
    assert far.arrived() == already + 1
    assert far.events.counts["timer.down"] == 0


FIRST_CALL = """
from celery import Celery
from delaytasks.broker.arming import EtaTimer, Sender
from delaytasks.broker.arming import Publisher
from delaytasks.events import Events
from delaytasks.model.clock import Clock
from delaytasks.model.task import Entry

app = Celery("producer", broker={url!r}, set_as_current=False)
publisher = Publisher(app, {namespace!r}, 0.5, Events())
Sender(EtaTimer(publisher, Clock()), Clock(), 0.5).arm([Entry(1, 0, 0)])
"""


def call_once(far: Far) -> None:
    script = FIRST_CALL.format(url=far.proxy.url(far.url), namespace=far.namespace)
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


@BROKERS
def test_a_short_lived_process_reaches_a_broker_and_hardly_waits_for_a_silent_one(far: Far) -> None:
    call_once(far)
    # RabbitMQ counts an unconfirmed message a moment later.
    wait_until(lambda: far.arrived() == 1, 5, "the message to be counted")
    far.proxy.swallow()
    began = time.monotonic()
    call_once(far)
    assert time.monotonic() - began < 15
    far.proxy.reset()


@pytest.mark.parametrize("arm", ["inline", "background"])
@BROKERS
def test_a_worker_receives_several_tasks_in_a_round_trip_to_a_distant_broker(
    deploy: Deploy, proxies: list[Proxy], broker: str, arm: str
) -> None:
    """With one task in each round trip of 0.1 s, a hundred tasks would take ten seconds.

    With `arm="inline"` each task has a message of its own.
    """
    # Only messages can start tasks within the time of this test.
    d = deploy("postgresql", broker, arm=arm, _self_sweep_s=600, _grace_s=60)
    proxies.append(proxy := proxy_to(d.conf["broker_url"]))
    proxy.delay_s = DELAY_S
    d.conf["broker_url"] = proxy.url(d.conf["broker_url"])
    worker = d.worker(concurrency=1)
    ids = {str(d.schedule().id) for _ in range(100)}
    wait_until(lambda: {run[0] for run in d.runs()} == ids, 7, worker.log)
    worker.terminate()
    assert "Traceback" not in worker.log()
