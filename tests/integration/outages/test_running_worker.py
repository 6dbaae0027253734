"""Workers whose broker or database is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from delaytasks import DelayedTask
from delaytasks.core.workers import ServiceTimes
from delaytasks.runtime import runtime_of
from tests.integration.conftest import ProxiedSite
from tests.integration.outages.proxied_caller import BROKERS, DATABASES, LIMIT_S, SLACK_S, seconds
from tests.proxy import proxy_to
from tests.running import Deployment, Process
from tests.services import kill_connections
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: This outage is longer than a worker's pauses between two attempts to connect.
AWAY_S = 13
#: The sum of a worker's longest pause and the longest attempt to connect.
RECONNECTS_S = 4 + 4


@DATABASES
def test_a_worker_whose_database_connections_are_killed_runs_all(
    proxied_site: Callable[..., ProxiedSite], database: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{database}_url")
    d = proxied_site(database, "redis").deployment
    worker = d.worker()
    tasks = [d.schedule(delay=1 + n / 50) for n in range(200)]
    for part in range(1, 5):
        wait_until(lambda part=part: len(d.runs()) >= 40 * part, 20, f"{40 * part} runs")  # type: ignore[misc]
        kill_connections(url)
    d.wait_for(tasks, deadline_s=30)
    assert not worker.ended()
    assert {run[0] for run in d.runs()} == {str(task.id) for task in tasks}
    assert all(d.delays.get(task).runs <= 5 for task in tasks)


@BROKERS
def test_a_worker_whose_broker_is_cut_again_and_again_resumes(
    proxied_site: Callable[..., ProxiedSite], broker: str
) -> None:
    place = proxied_site("postgresql", broker)
    d = place.deployment
    worker = d.worker()
    for round in range(5):
        if round % 2:
            place.broker.refuse()
        else:
            place.broker.reset()
        # The broker is unreachable, or has just become reachable again.
        away = [d.schedule(delay=0.2) for _ in range(5)]
        place.broker.heal()
        d.wait_for(away, deadline_s=15)
        # The broker accepts messages again when a task runs on time without a sweep.
        wait_until(d.runs_on_time, 15, "a task on time", every_s=0.2)
    assert not worker.ended()
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs))


@BROKERS
def test_a_worker_without_its_broker_shows_this_in_its_row_until_it_is_back(
    proxied_site: Callable[..., ProxiedSite], broker: str
) -> None:
    place = proxied_site("postgresql", broker)
    d = place.deployment
    d.beat()
    d.worker()

    def services() -> ServiceTimes:
        [worker] = d.store.workers.registered(d.store.tasks.now(), 60)
        return worker.services

    wait_until(lambda: d.store.workers.all() and (services().beat_s or 9) < 2, 20, "beat")
    assert services()[:2] == (None, None)
    place.broker.refuse()

    def is_outage_known() -> bool:
        d.schedule(delay=0.2)  # a sweep that finds it, and tries the broker, cannot send
        return bool(services().broker_down_s and services().timer_down_s)

    wait_until(is_outage_known, 20, "the outage", every_s=0.5)
    place.broker.heal()
    wait_until(lambda: services()[:2] == (None, None), 20, "the end of the outage")


@dataclass
class Outage:
    """Run a producer, a beat and a worker during one kind of outage of one broker."""

    name: str
    place: ProxiedSite
    worker: Process
    tasks: list[DelayedTask] = field(default_factory=list)
    healed_at: datetime = datetime.max

    def begin(self) -> None:
        wait_until(
            self.place.deployment.runs_on_time, 15, f"a task on time, {self.name}", every_s=0.2
        )
        if self.name.endswith("refused"):
            self.place.broker.refuse()
        else:
            self.place.broker.swallow()

    def schedule(self) -> None:
        took = seconds(lambda: self.tasks.append(self.place.deployment.schedule(delay=0.5)))
        assert took < LIMIT_S + SLACK_S, self.name

    def end(self) -> None:
        # A reset discards the swallowed bytes and their connections.
        self.place.broker.reset()
        self.place.broker.heal()
        self.healed_at = runtime_of(self.place.deployment.delays).clock.now()

    def longest_s(self) -> float:
        """Return the longest delay of a task, in seconds.

        The delay begins when the task is due and its broker is reachable again, and ends when it
        runs.
        """
        late_us = {run[0]: int(run[1]) for run in self.place.deployment.runs()}
        ran_at = {
            task: task.expected_time + timedelta(microseconds=late_us[str(task.id)])
            for task in self.tasks
        }
        return max(
            (at - max(task.expected_time, self.healed_at)).total_seconds()
            for task, at in ran_at.items()
        )


def test_tasks_scheduled_during_a_long_broker_outage_run_soon_after_it(
    proxied_site: Callable[..., ProxiedSite], tmp_path: Path
) -> None:
    """Run four outages simultaneously, since the test mostly waits.

    Each of two brokers refuses connections or swallows bytes.
    """
    outages = []
    for broker in ("redis", "rabbitmq"):
        for way in ("refused", "swallowed"):
            (folder := tmp_path / f"{broker}-{way}").mkdir()
            place = proxied_site("postgresql", broker, folder=folder, _self_sweep_s=60)
            place.deployment.beat()
            outages.append(Outage(folder.name, place, place.deployment.worker(pool="threads")))
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
        d = one.place.deployment
        d.wait_for(one.tasks, deadline_s=30)
        r1_s = d.settings["_grace_s"] + d.settings["sweep"] + 2
        assert one.longest_s() < RECONNECTS_S + r1_s + SLACK_S, one.name
        assert not one.worker.ended()
        runs = [run[0] for run in d.runs()]
        assert len(runs) == len(set(runs))


def test_a_worker_started_while_the_database_is_away_waits_for_it(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    database = proxy_to(postgresql_url)
    d = Deployment(tmp_path, database.url(postgresql_url), redis_url)
    try:
        task = d.schedule(delay=1)
        database.refuse()
        worker = d.worker()
        database.heal()
        d.wait_for([task], deadline_s=20)
        assert not worker.ended()
    finally:
        database.heal()
        d.close()
        database.close()
