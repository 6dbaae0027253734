"""Test pausing and resuming with real workers, on each pool."""

from __future__ import annotations

from functools import partial

import pytest

from delaytasks import Status
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ENDS = (Status.DONE, Status.HELD)


@pytest.fixture
def site(deploy: Deploy) -> Deployment:
    return deploy()


@pytest.mark.parametrize(
    ("pool", "kind"), [("threads", "tag"), ("prefork", "queue"), ("solo", "tag")]
)
def test_paused_tasks_do_not_run_until_resumed(site: Deployment, pool: str, kind: str) -> None:
    names = {"tag": "test.note"} if kind == "tag" else {"queue": "default"}
    site.worker(pool=pool)
    site.wait_for([site.schedule()])
    site.delays.policies.pause(**names)

    def is_held() -> bool:
        probe = site.schedule()
        wait_until(lambda: site.status(probe) in ENDS, 10, "the probe to end", every_s=0.02)
        return site.status(probe) is Status.HELD

    # Workers apply a change after about a second.
    wait_until(is_held, 3, "a task to be held", every_s=0.05)
    ran = len(site.runs())
    waits = [site.schedule(delay=n / 20) for n in range(20)]
    far = [site.schedule(delay=60 + n) for n in range(3)]
    others = [site.schedule("test.mail", delay=n / 20, queue="mail") for n in range(20)]
    site.wait_for(others)
    site.wait_for(waits, Status.HELD)
    noted = [run for run in site.runs() if run[1] != "mail"]
    assert len(noted) == ran, "nothing of it ran"
    # A sweep moves the distant rows to HELD, possibly between the two queries.
    held = partial(site.delays.find, status="HELD", limit=1000)
    wait_until(lambda: site.delays.policies.list()[0].held == len(held()), 10, "a count")
    site.delays.policies.resume(**names)
    site.wait_for(waits)
    ids = {str(task.id) for task in waits}
    order = [run[0] for run in site.runs() if run[0] in ids]
    assert sorted(order) == sorted(ids), "each of them ran once"
    if pool == "solo":
        by_due_time = sorted(waits, key=lambda task: task.expected_time)
        assert order == [str(task.id) for task in by_due_time]
    assert {site.status(task) for task in far} == {Status.NOT_COMPLETE}
