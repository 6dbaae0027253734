"""Real workers pass the request to cancel a running task to the process that runs it."""

from __future__ import annotations

from functools import partial

import pytest

from delaytasks import DelayedTask, Status
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow

#: The policies and the number of the requests are read once a second.
HEARD_S = 2
#: A lease is renewed after a third of it: the request must not wait for that.
LEASE_S = 30


@pytest.fixture
def deploy(deploy: Deploy) -> Deploy:
    return partial(
        deploy, conf={"imports": ["tests.project", "tests.cancel_project"]}, lease=LEASE_S
    )


def begun(d: Deployment, tag: str) -> DelayedTask:
    """Return a task of this tag that runs."""
    task = d.schedule(tag)
    wait_until(lambda: [str(task.id), "began"] in d.runs(), 20, f"{tag} to run")
    return task


@pytest.mark.parametrize(
    ("database", "pool"),
    [
        pytest.param("postgresql", "prefork", marks=pytest.mark.quick),
        ("mysql", "prefork"),
        ("sqlite", "threads"),
    ],
)
def test_a_running_task_notices_its_cancellation_and_is_not_retried(
    deploy: Deploy, database: str, pool: str
) -> None:
    d = deploy(database)
    d.worker(pool=pool)
    for tag in ("cancel.checks", "cancel.threads", "cancel.coroutine"):
        task, other = begun(d, tag), begun(d, tag)
        assert d.delays.cancel(task, running=True).is_requested
        wait_until(
            lambda task=task: d.delays.get(task).is_finished,  # type: ignore[misc]
            HEARD_S + SLACK_S,
            f"{tag} to be cancelled",
        )
        assert d.delays.get(task).status is Status.CANCELLED
        assert d.delays.get(other).status is Status.RUNNING
        d.delays.cancel(other, running=True)
        d.wait_for([other], Status.CANCELLED)
