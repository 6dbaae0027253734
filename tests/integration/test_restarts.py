"""A Redis that is restarted again and again under workers, for each timer: broker and timer are empty each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tests.running import QUICK, Deployment
from tests.waiting import wait_until

ROUNDS = 20
RESUMES_S = 10


@pytest.fixture
def server(start_redis: Callable[[], RedisServer]) -> RedisServer:
    return start_redis()


@pytest.fixture
def deployments(tmp_path: Path, postgresql_url: str, server: RedisServer) -> Iterator[list[Deployment]]:
    made = []
    for timer in ("eta", "redis"):
        folder = tmp_path / timer
        folder.mkdir()
        made.append(Deployment(folder, postgresql_url, server.url, timer=timer))
    yield made
    for deployment in made:
        deployment.close()


def test_workers_resume_each_time_their_redis_is_restarted(deployments: list[Deployment], server: RedisServer) -> None:
    workers = [d.worker() for d in deployments]
    tasks = [(d, d.schedule(delay=n / 2)) for d in deployments for n in range(20)]
    for _ in range(ROUNDS):
        tasks += [(d, d.schedule(delay=0.2)) for d in deployments for _ in range(5)]
        server.restart()
        for d in deployments:
            wait_until(lambda d=d: is_in_time(d), RESUMES_S, "a task to be in time", every_s=0.2)  # type: ignore[misc]
    assert not any(worker.ended() for worker in workers)
    for d in deployments:
        mine = [task for place, task in tasks if place is d]
        d.wait_for(mine)
        runs = [run[0] for run in d.runs()]
        assert len(runs) == len(set(runs)), "no task runs twice"
        assert {str(task.id) for task in mine} <= set(runs)


def is_in_time(d: Deployment) -> bool:
    """Whether the fast path brings a task: the sweep leaves it alone for the grace."""
    task = d.schedule(delay=0.2)
    d.wait_for([task])
    return next(int(run[1]) for run in d.runs() if run[0] == str(task.id)) < QUICK["grace_s"] * 1e6
