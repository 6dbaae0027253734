"""A deployment goes from one timer to the other while tasks are pending: nothing is lost, nothing runs twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.timer_faults import R1_S, SLACK_S
from tests.conformance.timers import ran_once
from tests.running import Deployment

OTHER = {"eta": "redis", "redis": "eta"}


@pytest.fixture(params=OTHER)
def d(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    postgresql_url: str,
    rabbitmq_url: str,
    redis_url: str,
) -> Iterator[Deployment]:
    deployment = Deployment(
        tmp_path, postgresql_url, rabbitmq_url, timer=request.param, redis_url=redis_url
    )
    yield deployment
    deployment.close()


def test_switching_the_timer_loses_and_repeats_nothing(d: Deployment) -> None:
    old_worker, old_producer = d.worker(), d.delays
    tasks = [d.schedule(delay=n / 5) for n in range(20)]
    ran_once(d, tasks[:2])

    d.settings["timer"] = OTHER[d.settings["timer"]]
    d.worker()
    tasks += [d.schedule(delay=n / 5) for n in range(10)]  # with workers of both
    old_worker.terminate()
    tasks += [d.schedule(delay=n / 5) for n in range(10)]  # by a producer that is not switched yet
    d.delays = d.producer()
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    ran_once(d, tasks, deadline_s=4 + R1_S + SLACK_S)
    old_producer.close()
