"""Test healthy brokers with a slow network: messages arrive, and callers wait within the limit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.test_timers import messages
from tests.integration.conftest import Deploy
from tests.integration.outages.conftest import BROKERS, LIMIT_S, SLACK_S, Connect, seconds
from tests.proxy import Proxy, proxy_to
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: The proxy delays each direction by this many seconds, so a round trip takes 0.1 s.
DELAY_S = 0.05
#: This is longer than the dozen round trips of a new connection.
CONNECTED_S = 10
THREADS, CALLS = 16, 80


@BROKERS
def test_many_threads_reach_a_distant_broker_without_and_with_a_connection(
    connect: Connect, broker: str
) -> None:
    caller = connect(broker=broker, pool_size=THREADS)
    caller.delays.schedule_delay("mail", {}, 3600)
    arrived = list[int]()

    def schedule(_: int) -> float:
        return seconds(lambda: caller.delays.schedule_delay("mail", {}, 5))

    def have_arrived(number: int) -> bool:
        arrived.extend(id for ids in messages(caller) for id in ids)
        return len(arrived) == number

    for number in (CALLS, 2 * CALLS):  # the first ones connect
        caller.broker.delay_s = DELAY_S
        with ThreadPoolExecutor(THREADS) as pool:
            assert max(pool.map(schedule, range(CALLS))) < LIMIT_S + SLACK_S
        if number == CALLS:
            assert caller.broker.accepted <= 2, "one of ours; Kombu opens a second one for Redis"
        caller.broker.delay_s = 0  # for the test, which reads the messages one by one
        wait_until(lambda n=number: have_arrived(n), CONNECTED_S, "all messages")  # type: ignore[misc]
    assert caller.count("timer.down") == 0


@BROKERS
def test_a_connection_that_was_closed_while_idle_loses_no_message(
    connect: Connect, broker: str
) -> None:
    caller = connect(broker=broker)
    caller.warm_up()
    caller.broker.reset()
    if broker == "rabbitmq":  # the first write to a connection that was just closed does not fail
        caller.delays.schedule_delay("mail", {}, 5)
    already = caller.arrived()
    caller.delays.schedule_delay("mail", {}, 5)
    wait_until(lambda: caller.arrived() == already + 1, 5, "the message")
    assert caller.count("timer.down") == 0


@BROKERS
def test_a_worker_receives_several_tasks_in_a_round_trip_to_a_distant_broker(
    deploy: Deploy, proxies: list[Proxy], broker: str
) -> None:
    """With one task in each round trip of 0.1 s, a hundred tasks would take ten seconds.

    With `arm="inline"`, each task has a message of its own.
    """
    # Only messages can start tasks within the time of this test.
    d = deploy("postgresql", broker, arm="inline", _self_sweep_s=600, _grace_s=60)
    proxies.append(proxy := proxy_to(d.conf["broker_url"]))
    proxy.delay_s = DELAY_S
    d.conf["broker_url"] = proxy.url(d.conf["broker_url"])
    worker = d.worker(concurrency=1)
    ids = {str(d.schedule().id) for _ in range(100)}
    wait_until(lambda: {run[0] for run in d.runs()} == ids, 7, worker.log)
    worker.terminate()
    assert "Traceback" not in worker.log()
