"""Test deployments without a broker.

`delaytasks run` does all the work of a worker on each database, and runs each task once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from delaytasks import NewTask, Status
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.services import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def direct(deploy: Deploy) -> Callable[..., Deployment]:
    """Make deployments whose broker is unreachable, on PostgreSQL unless a database is named."""

    def make(database: str = "postgresql", **settings: Any) -> Any:
        broker_url = settings.pop("broker_url", f"redis://127.0.0.1:{free_port()}/0")
        return deploy(database, broker_url, **{"timer": "direct", **settings})

    return make


def test_drain_does_all_the_work_of_a_worker_and_ends(direct: Deploy, database_url: str) -> None:
    d = direct(database_url)
    d.delays.policies.pause(tag="test.word")
    d.delays.policies.set(tag="test.note", concurrency=1)
    mail = d.schedule("test.mail")
    batch = [d.schedule("test.batch", body={"number": number}) for number in range(0, 20, 2)]
    tags = ["test.wait", "test.async"] * 5
    side_by_side = [d.schedule(tag, body={"seconds": 0.1}) for tag in tags]
    climbing = d.schedule("test.fail", retries="0.1s")
    paused = d.schedule("test.word", body={"word": "never"})
    unknown = d.schedule("test.nobody")
    limited = [d.schedule() for _ in range(10)]
    done = [mail, *batch, *side_by_side, *limited]
    first = d.drain("-c", "2", deadline_s=60)
    clock = runtime_of(d.delays).clock
    wait_until(lambda: clock.now() > d.delays.get(climbing).expected_time, 10, "the last retry")
    second = d.drain("-c", "2", deadline_s=60)
    d.wait_for(done)
    d.wait_for([climbing], Status.FAILED, 40)
    assert d.delays.get(climbing).runs == 2
    # A worker claims a task without a processor for a moment, again and again.
    rests = {Status.NOT_COMPLETE, Status.HELD}
    wait_until(lambda: {d.status(paused), d.status(unknown)} <= rests, 5, "the others to wait")
    runs, notes = [run[0] for run in d.runs()], [str(task.id) for task in limited]
    assert sorted(run for run in runs if run in notes) == sorted(notes), "each once"
    assert [first["succeeded"], first["is_stopped"]] == [len(done), False]
    # The last retry may be due before the first drain ends.
    assert first["failed"] + second["failed"] == 1


@pytest.mark.quick
def test_the_direct_timer_makes_no_connection_to_the_broker(direct: Deploy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        d = direct(broker_url=f"redis://127.0.0.1:{mute.getsockname()[1]}/0")
        d.drainer()
        tasks = [d.schedule(delay=n / 50) for n in range(10)]
        d.delays.schedule_many(NewTask("test.quiet", None, delay=0.1) for _ in range(10))
        d.delays.reschedule(tasks[-1], 0.1)
        d.wait_for(tasks)
        d.drain()
        mute.setblocking(False)
        with pytest.raises(BlockingIOError):
            mute.accept()
