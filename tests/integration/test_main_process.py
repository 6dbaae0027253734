"""Tasks run even if the main process of a worker stops, or loses its services."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest

from delaytasks import Status
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow


class WorkerTable(Deployment):
    """Run workers that a test can tell what to do."""

    def tell(self, node: str, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command of `tests.saboteur` to a worker, and return its answer."""
        control = runtime_of(self.delays).celery.control
        how = {"destination": [node], "reply": True, "timeout": 10, "limit": 1}
        [answer] = control.broadcast(command, arguments, **how)
        found: dict[str, Any] = answer[node]
        return found

    def stats(self, node: str) -> dict[str, Any]:
        """Return delaytasks' section of the answer to `celery inspect stats`."""
        answer = runtime_of(self.delays).celery.control.inspect([node], timeout=10, limit=1).stats()
        found: dict[str, Any] = (answer or {}).get(node, {}).get("delaytasks", {})
        return found

    def rests(self, node: str) -> bool:
        stats = self.stats(node)
        return not stats.get("held", True) and not stats["waiting"] and not stats["chunks"]


@pytest.fixture
def workers(deploy: Deploy) -> Deployment:
    return deploy(conf={"imports": ["tests.project", "tests.saboteur"]}, kind=WorkerTable)


def test_the_entries_of_a_frozen_worker_run_once_elsewhere(workers: WorkerTable) -> None:
    frozen, node = workers.worker(), workers.node(0)
    held = [workers.schedule(delay=8) for _ in range(20)]
    wait_until(lambda: workers.stats(node).get("held") == 20, 7, "the worker to hold them")
    frozen.signal(signal.SIGSTOP)
    workers.worker()
    workers.wait_for(held)
    assert workers.early() == []
    assert max(workers.lateness_s()) < workers.r1_s() + SLACK_S
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: workers.rests(node), 20, "it to bring out what it held")
    after = workers.schedule()
    workers.wait_for([after])
    assert len(workers.runs()) == 21
    assert {workers.delays.get(task).runs for task in held} == {1}


def test_a_chunk_of_a_process_that_died_before_the_broker_blocks_none(workers: WorkerTable) -> None:
    """The new process inherits the pipe of the dead one.

    Celery therefore reports that the new process has the chunk.
    """
    workers.worker(concurrency=1)
    assert workers.tell(workers.node(0), "lose_broker")["forgotten"] == 1
    workers.wait_for([workers.schedule()], deadline_s=SLACK_S)


def test_a_stopping_worker_gets_the_report_of_an_unconfirmed_chunk(workers: WorkerTable) -> None:
    """Celery makes the pool forget the chunk.

    Billiard's process then waits 30 seconds for a process that reads its result.
    """
    worker = workers.worker(concurrency=1)
    workers.wait_for([workers.schedule()])
    wait_until(lambda: workers.rests(workers.node(0)), 10, "its process to have said so")
    process = int(workers.runs()[0][2])
    os.kill(process, signal.SIGSTOP)
    task = workers.schedule()
    wait_until(lambda: workers.stats(workers.node(0)).get("chunks"), 10, "its chunk to be sent")
    workers.schedule(delay=8)
    wait_until(lambda: workers.stats(workers.node(0)).get("held"), 7, "a task to be held")
    worker.signal(signal.SIGTERM)
    worker.wait_for("sent back 1 near tasks", 10)
    os.kill(process, signal.SIGCONT)
    wait_until(worker.ended, 10, "it to end")
    assert (worker.status, workers.status(task)) == (0, Status.DONE)


# -- An unreachable database silences all workers -------------------------------------------------

# No worker declares itself or another worker lost for that reason.


#: A worker is lost after three silent sweep intervals; these tests sweep every second.
SILENT_S = 3


def sweeps_go_on(d: Deployment) -> None:
    """Wait until there were several sweeps, and until each worker has reported."""
    w, s = d.store.schema.workers, d.store.schema.sweeps
    later = d.store.tasks.now() + timedelta(seconds=SILENT_S + 2)

    def done() -> bool:
        with d.store.database.auto.connect() as connection:
            seen = [row.seen_at for row in connection.execute(w.select())]
            swept = [row.swept_at for row in connection.execute(s.select())]
        return bool(seen) and min([*seen, *swept]) > later

    wait_until(done, 60, lambda: f"sweeps after the outage\n{d.logs()}", every_s=0.2)


@pytest.mark.parametrize("database", ["postgresql", "mysql"])
@pytest.mark.parametrize("outage", ["refuse", "swallow"])
def test_no_worker_is_lost_because_of_an_outage(deploy: Deploy, database: str, outage: str) -> None:
    d = deploy(database, proxied=["database"])
    proxy, clock = d.proxies["database"], runtime_of(d.delays).clock
    workers = [d.worker(pool="threads"), d.worker(pool="threads")]
    d.wait_for([d.schedule()])
    tasks = [d.schedule(delay=delay) for delay in (1, 2, 3)]
    getattr(proxy, outage)()
    ends = clock.now() + timedelta(seconds=3 * SILENT_S)
    wait_until(lambda: clock.now() > ends, 30, "the outage", every_s=0.1)
    proxy.heal()
    d.wait_for(tasks, deadline_s=40)
    sweeps_go_on(d)
    logs = "".join(worker.log() for worker in workers)
    assert "worker.lost" not in logs, logs
    assert "queue.unserved" not in logs, logs
    workers[0].kill()
    workers[1].wait_for(f"worker.lost worker='{d.node(0)}'", 40)
