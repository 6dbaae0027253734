"""Workers whose broker or database is interrupted."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from delaytasks import DelayedTask
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.integration.outages.conftest import LIMIT_S, SLACK_S, seconds
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: This outage is longer than a worker's pauses between two attempts to connect.
AWAY_S = 13
#: The sum of a worker's longest pause and the longest attempt to connect.
RECONNECTS_S = 4 + 4


class Outage:
    """A producer, a beat and a worker during one kind of outage of one broker."""

    def __init__(self, start: Deploy, broker: str, way: str) -> None:
        self.name, self.way = f"{broker}-{way}", way
        self.d = start("postgresql", broker, folder=self.name, proxied=["broker"], _self_sweep_s=60)
        self.proxy = self.d.proxies["broker"]
        self.d.beat()
        self.worker = self.d.worker(pool="threads")
        self.tasks: list[DelayedTask] = []

    def begin(self) -> None:
        wait_until(self.d.runs_on_time, 15, f"a task on time, {self.name}", every_s=0.2)
        getattr(self.proxy, self.way)()

    def schedule(self) -> None:
        took = seconds(lambda: self.tasks.append(self.d.schedule(delay=0.5)))
        assert took < LIMIT_S + SLACK_S, self.name

    def end(self) -> None:
        [worker] = self.d.store.workers.registered(self.d.store.tasks.now(), 60)
        assert self.way == "swallow" or worker.services.broker_down_s, "its row shows the outage"
        # A reset discards the swallowed bytes and their connections.
        self.proxy.reset()
        self.proxy.heal()
        self.healed_at = runtime_of(self.d.delays).clock.now()

    def longest_s(self) -> float:
        """Return the longest time from when a task is due and its broker is reachable again until
        the task runs.
        """
        late = {run[0]: timedelta(microseconds=int(run[1])) for run in self.d.runs()}
        return max(
            task.expected_time + late[str(task.id)] - max(task.expected_time, self.healed_at)
            for task in self.tasks
        ).total_seconds()


def test_tasks_scheduled_during_a_long_broker_outage_run_soon_after_it(deploy: Deploy) -> None:
    """Run four outages simultaneously, since the test mostly waits."""
    outages = [
        Outage(deploy, broker, way)
        for broker in ("redis", "rabbitmq")
        for way in ("refuse", "swallow")
    ]
    for one in outages:
        one.begin()
    began = time.monotonic()
    while time.monotonic() < began + AWAY_S:
        for one in outages:
            one.schedule()
        time.sleep(1)
    for one in outages:
        one.end()
    for one in outages:
        d = one.d
        d.wait_for(one.tasks, deadline_s=30)
        r1_s = d.settings["_grace_s"] + d.settings["sweep"] + 2
        assert one.longest_s() < RECONNECTS_S + r1_s + SLACK_S, one.name
        assert not one.worker.ended()
        runs = [run[0] for run in d.runs()]
        assert len(runs) == len(set(runs))


def test_a_worker_started_while_the_database_is_away_waits_for_it(deploy: Deploy) -> None:
    d = deploy(proxied=["database"])
    task = d.schedule(delay=1)
    d.proxies["database"].refuse()
    worker = d.worker()
    d.proxies["database"].heal()
    d.wait_for([task], deadline_s=20)
    assert not worker.ended()
