"""Workers report to Sentry with the real SDK, whose transport writes to a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayedTask
from tests.running import Deployment, Process
from tests.waiting import wait_until

pytest.importorskip("sentry_sdk")
pytestmark = pytest.mark.slow
IMPORTS = {"imports": ["tests.project", "tests.sentry_project"]}


class ReportingSite(Deployment):
    def __init__(self, folder: Path, database_url: str, broker_url: str) -> None:
        super().__init__(folder, database_url, broker_url, IMPORTS, max_lost_leases=1)
        self.envelopes = folder / "envelopes.jsonl"
        self.envelopes.touch()

    def worker(self, *options: str, **more: Any) -> Process:
        return super().worker(*options, DELAYTASKS_TEST_ENVELOPES=str(self.envelopes), **more)

    def run(self, *tags: str, **body: Any) -> list[DelayedTask]:
        """Run a task of each tag, and return the tasks when all have ended."""
        bodies = [{"word": "pear", "number": n, **body} for n in range(len(tags))]
        tasks = [self.schedule(tag, body=each) for tag, each in zip(tags, bodies, strict=True)]
        wait_until(lambda: all(self.delays.get(task).is_finished for task in tasks), 30, self.logs)
        return tasks

    def items(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.envelopes.read_text().splitlines()]
        return [line for line in lines if line["item"] == kind]

    def errors(self, count: int) -> list[dict[str, Any]]:
        """Return the errors as soon as there are this many."""
        wait_until(lambda: len(self.items("event")) >= count, 20, f"{count} events", every_s=0.05)
        return self.items("event")


@pytest.fixture
def site(tmp_path: Path, postgresql_url: str, redis_url: str) -> Iterator[ReportingSite]:
    made = ReportingSite(tmp_path, postgresql_url, redis_url)
    yield made
    made.close()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_each_failure_is_one_event_and_retries_are_none(site: ReportingSite, pool: str) -> None:
    worker = site.worker(pool=pool)
    task = site.schedule("sentry.fails", body={"word": "pear"}, key="order-7")
    tags = ["also_fails", "fails_twice", "returns_fail", "async"]
    singly = [*(f"sentry.{tag}" for tag in tags), "sentry.retries"]
    batch = site.run(*singly, *["sentry.batch"] * 6)[len(singly) :]
    found = site.errors(8)
    odd = {str(task.id) for n, task in enumerate(batch) if n % 2 == 0}  # their numbers are 5 to 10
    of_batch = [event for event in found if event["tags"]["delaytasks.tag"] == "sentry.batch"]
    assert {event["tags"]["delaytasks.id"] for event in of_batch} == odd
    assert len(of_batch) == 3
    assert len(site.items("event")) == 8, site.items("event")
    events = {event["tags"]["delaytasks.tag"]: event for event in found}
    event = events["sentry.fails"]
    [error] = event["exception"]["values"]
    assert error["type"] == "OrderError"
    assert error["value"] == f"order {task.id} is broken"
    assert error["stacktrace"]["frames"][-1]["function"] == "fails"
    assert error["mechanism"] == {"type": "delaytasks", "handled": False}
    wanted = {"tag": "sentry.fails", "id": str(task.id), "key": "order-7", "attempt": "1"}
    own = {f"delaytasks.{name}": value for name, value in wanted.items()}
    assert event["tags"] == event["tags"] | own | {"from_processor": "pear"}
    assert event["transaction"] == "sentry.fails"
    assert "pear" not in json.dumps(event["contexts"]["delaytasks"]), "the body is not sent"
    for tag in ("fails", *tags):
        wanted_print = ["{{ default }}", f"sentry.{tag}"]
        assert events[f"sentry.{tag}"]["fingerprint"] == wanted_print, "its own issue"
    assert events["sentry.fails_twice"]["tags"]["delaytasks.attempt"] == "2"
    [declined] = events["sentry.returns_fail"]["exception"]["values"]
    assert declined["type"] == "TaskFailedError"
    assert "the card was declined" in declined["value"]
    [in_loop] = events["sentry.async"]["exception"]["values"]
    assert in_loop["stacktrace"]["frames"][-1]["function"] == "fails_on_the_loop"
    # The worker's log has the exception, too.
    log = worker.log()
    assert f"task.failed id={task.id}" in log
    assert "tests.sentry_project.OrderError: order" in log
    assert "in fails" in log


def test_a_task_that_failed_because_its_process_died_is_one_event(site: ReportingSite) -> None:
    worker = site.worker()
    [task] = site.run("sentry.kills")

    def found() -> list[dict[str, Any]]:
        # Celery logs the end of the process, which Sentry reports too.
        return [event for event in site.items("event") if event["logger"] == "delaytasks"]

    wait_until(found, 20, site.logs, every_s=0.05)
    worker.terminate()
    [event] = found()
    assert event["level"] == "error"
    # Newer versions of Sentry have the finished text as well.
    message = event["logentry"]["message"] % tuple(event["logentry"]["params"])
    assert message.startswith(f"task.worker_lost id={task.id} ")
    assert event["fingerprint"] == ["delaytasks", "task.worker_lost", "sentry.kills"]


def test_the_run_continues_the_trace_of_the_scheduling_call(site: ReportingSite) -> None:
    import sentry_sdk
    from sentry_sdk.transport import Transport

    from delaytasks.contrib.sentry import DelayTasksIntegration

    class Nowhere(Transport):
        def capture_envelope(self, envelope: Any) -> None: ...

    site.worker()
    ours: dict[str, Any] = {"integrations": [DelayTasksIntegration()], "transport": Nowhere}
    ours |= {"traces_sample_rate": 1.0, "default_integrations": False}
    sentry_sdk.init("http://key@127.0.0.1/1", **ours)
    try:
        with sentry_sdk.start_transaction(name="POST /orders") as request:
            task, _ = site.run("sentry.fails", "sentry.quiet")
    finally:
        sentry_sdk.init()  # without a client, the integration does nothing
    assert task.meta["sentry-trace"].startswith(request.trace_id)
    [event] = site.errors(1)
    assert event["contexts"]["trace"]["trace_id"] == request.trace_id
    wait_until(lambda: len(site.items("transaction")) >= 2, 20, "the runs to be sent")
    runs = {run["transaction"]: run["contexts"]["trace"] for run in site.items("transaction")}
    for tag, status in (("sentry.fails", "internal_error"), ("sentry.quiet", "ok")):
        assert runs[tag]["trace_id"] == request.trace_id
        assert runs[tag]["op"] == "queue.process"
        assert runs[tag]["status"] == status
    assert runs["sentry.fails"]["parent_span_id"] == task.meta["sentry-trace"].split("-")[1]
    assert runs["sentry.fails"]["data"]["messaging.message.id"] == str(task.id)
    assert site.schedule("sentry.quiet").meta == {}


def test_without_the_integration_failures_have_exceptions(site: ReportingSite) -> None:
    worker = site.worker(DELAYTASKS_TEST_SENTRY="default")
    [task] = site.run("sentry.fails")
    [event] = site.errors(1)
    [error] = event["exception"]["values"]
    assert error["value"] == f"order {task.id} is broken"
    assert error["stacktrace"]["frames"][-1]["function"] == "fails"
    assert "in fails" in worker.log()
