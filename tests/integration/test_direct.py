"""Test deployments without a broker.

`delaytasks run` does all the work of a worker on each database, and runs each task once.
"""

from __future__ import annotations

import socket

import pytest

from delaytasks import NewTask, Status
from tests.integration.conftest import Deploy
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_drain_does_all_the_work_of_a_worker_and_ends(deploy: Deploy, database_url: str) -> None:
    d = deploy(database_url, "redis://127.0.0.1:1/0", timer="direct")
    d.delays.policies.pause(tag="test.quiet")
    d.delays.policies.set(tag="test.note", concurrency=1)
    mail = d.schedule("test.mail")
    batch = [d.schedule("test.batch", body={"number": number}) for number in range(0, 20, 2)]
    tags = ["test.wait", "test.async"] * 5
    side_by_side = [d.schedule(tag, body={"seconds": 0.1}) for tag in tags]
    climbing = d.schedule("test.fail", retries="0.1s")
    paused = d.schedule("test.quiet")
    unknown = d.schedule("test.nobody")
    limited = [d.schedule() for _ in range(10)]
    done = [mail, *batch, *side_by_side, *limited]
    first = d.drain("-c", "2", deadline_s=60)
    wait_until(lambda: d.now() > d.delays.get(climbing).expected_time, 10, "the last retry")
    second = d.drain("-c", "2", deadline_s=60)
    d.wait_for(done)
    d.wait_for([climbing], Status.FAILED, 40)
    assert d.delays.get(climbing).runs == 2
    # A worker claims a task without a processor for a moment, again and again.
    rests = {Status.NOT_COMPLETE, Status.HELD}
    wait_until(lambda: {d.status(paused), d.status(unknown)} <= rests, 5, "the others to wait")
    assert [first["succeeded"], first["is_stopped"]] == [len(done), False]
    # The last retry may be due before the first drain ends.
    assert first["failed"] + second["failed"] == 1
    notes = {str(task.id) for task in limited}
    assert sorted(run[0] for run in d.runs() if run[0] in notes) == sorted(notes), "each once"
    totals = d.delays.statistics.totals(since="2h")
    counted = {tag: (one.started, one.done, one.failed) for tag, one in totals.items()}
    assert (counted["test.note"], counted["test.batch"]) == ((10, 10, 0), (10, 10, 0))


@pytest.mark.quick
def test_the_direct_timer_makes_no_connection_to_the_broker(deploy: Deploy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        d = deploy(broker=f"redis://127.0.0.1:{mute.getsockname()[1]}/0", timer="direct")
        d.drainer()
        tasks = [d.schedule(delay=n / 50) for n in range(10)]
        d.delays.schedule_many(NewTask("test.quiet", None, delay=0.1) for _ in range(10))
        d.delays.reschedule(tasks[-1], 0.1)
        d.wait_for(tasks)
        d.drain()
        mute.setblocking(False)
        with pytest.raises(BlockingIOError):
            mute.accept()
