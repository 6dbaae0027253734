"""Tasks run even if the main process of a worker stops, or loses its broker."""

from __future__ import annotations

import os
import signal
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
