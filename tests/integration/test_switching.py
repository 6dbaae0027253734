"""A deployment changes its timer while tasks are pending.

No task is lost, and no task runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.timer_faults import R1_S, SLACK_S
from tests.conformance.timers import ran_once
from tests.running import Deployment

pytestmark = pytest.mark.slow

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
    # Workers of both timers run.
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    old_worker.terminate()
    # The producer still uses the old timer.
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    d.delays = d.producer()
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    ran_once(d, tasks, deadline_s=4 + R1_S + SLACK_S)
    old_producer.close()
