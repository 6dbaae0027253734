"""Workers report to Sentry with the real SDK, whose transport writes to a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from delaytasks import DelayedTask
from tests.integration.conftest import Deploy
from tests.running import Deployment, Process
from tests.waiting import wait_until

pytest.importorskip("sentry_sdk")
pytestmark = pytest.mark.slow


class ReportingSite(Deployment):
    def worker(self, *options: str, **more: Any) -> Process:
        (file := self.folder / "envelopes.jsonl").touch()
        return super().worker(*options, DELAYTASKS_TEST_ENVELOPES=str(file), **more)

    def run(self, *tags: str, **options: Any) -> list[DelayedTask]:
        """Run a task of each tag, and return the tasks when all have ended."""
        bodies = [{"word": "pear", "number": n} for n in range(len(tags))]
        made = [
            self.schedule(tag, body=body, **options) for tag, body in zip(tags, bodies, strict=True)
        ]
        wait_until(lambda: all(self.delays.get(task).is_finished for task in made), 30, self.logs)
        return made

    def items(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Return the errors or the transactions as soon as there are this many."""

        def found() -> list[dict[str, Any]]:
            text = (self.folder / "envelopes.jsonl").read_text()
            return [line for line in map(json.loads, text.splitlines()) if line["item"] == kind]

        wait_until(lambda: len(found()) >= count, 20, f"{count} of {kind}", every_s=0.05)
        return found()


@pytest.fixture
def site(deploy: Deploy) -> ReportingSite:
    conf = {"imports": ["tests.project", "tests.sentry_project"]}
    return deploy(conf=conf, kind=ReportingSite, max_lost_leases=1)


@contextmanager
def web_request() -> Iterator[Any]:
    """Yield the transaction of a request in this process."""
    import sentry_sdk
    from sentry_sdk.transport import Transport

    from delaytasks.contrib.sentry import DelayTasksIntegration

    class Nowhere(Transport):
        def capture_envelope(self, envelope: Any) -> None: ...

    ours: dict[str, Any] = {"integrations": [DelayTasksIntegration()], "transport": Nowhere}
    ours |= {"traces_sample_rate": 1.0, "default_integrations": False}
    sentry_sdk.init("http://key@127.0.0.1/1", **ours)
    try:
        with sentry_sdk.start_transaction(name="POST /orders") as request:
            yield request
    finally:
        sentry_sdk.init()  # without a client, the integration does nothing


def test_each_failure_is_one_event_in_the_trace_of_its_call(site: ReportingSite) -> None:
    worker = site.worker()
    tags = [f"sentry.{tag}" for tag in ("fails", "fails_twice", "returns_fail", "async")]
    with web_request() as request:
        task, *_ = site.run(*tags, key="order-7")
        site.run("sentry.retries", "sentry.quiet")
    batch = site.run(*["sentry.batch"] * 6)
    found = site.items("event", 7)
    assert len(found) == 7, found
    of_batch = [event for event in found if event["tags"]["delaytasks.tag"] == "sentry.batch"]
    ids = sorted(int(event["tags"]["delaytasks.id"]) for event in of_batch)
    assert ids == [one.id for one in batch[1::2]], "the ones whose numbers are odd"
    events = {event["tags"]["delaytasks.tag"]: event for event in found}
    for tag in tags:
        assert events[tag]["fingerprint"] == ["{{ default }}", tag], "its own issue"
        assert events[tag]["contexts"]["trace"]["trace_id"] == request.trace_id
    errors = {tag: event["exception"]["values"][0] for tag, event in events.items()}

    event, error = events["sentry.fails"], errors["sentry.fails"]
    assert (error["type"], error["value"]) == ("OrderError", f"order {task.id} is broken")
    assert error["mechanism"] == {"type": "delaytasks", "handled": False}
    wanted = {"tag": "sentry.fails", "id": str(task.id), "key": "order-7", "attempt": "1"}
    own = {f"delaytasks.{name}": value for name, value in wanted.items()}
    assert event["tags"] == event["tags"] | own | {"from_processor": "pear"}
    assert "pear" not in json.dumps(event["contexts"]["delaytasks"]), "the body is not sent"
    assert events["sentry.fails_twice"]["tags"]["delaytasks.attempt"] == "2"
    assert errors["sentry.returns_fail"]["type"] == "TaskFailedError"
    assert "the card was declined" in errors["sentry.returns_fail"]["value"]
    in_loop = errors["sentry.async"]["stacktrace"]["frames"][-1]
    assert in_loop["function"] == "fails_on_the_loop"
    for words in (f"task.failed id={task.id}", "tests.sentry_project.OrderError: order"):
        assert words in worker.log(), "the worker's log has the exception, too"

    sent = site.items("transaction", 8)
    runs = {run["transaction"]: run["contexts"]["trace"] for run in sent}
    for tag, status in (("sentry.fails", "internal_error"), ("sentry.quiet", "ok")):
        assert runs[tag]["trace_id"] == request.trace_id
        assert (runs[tag]["op"], runs[tag]["status"]) == ("queue.process", status)
    assert task.meta["sentry-trace"].split("-")[:2] == [
        request.trace_id, runs["sentry.fails"]["parent_span_id"],
    ]  # fmt: skip
    assert batch[0].meta == {}, "scheduled without a client"

    [killed] = site.run("sentry.kills")

    def ours() -> list[dict[str, Any]]:
        # Celery logs the end of the process, which Sentry reports too.
        return [it for it in site.items("event", 8) if it.get("logger") == "delaytasks"]

    wait_until(ours, 20, site.logs, every_s=0.05)
    worker.terminate()
    [event] = ours()
    assert event["level"] == "error"
    # Newer versions of Sentry have the finished text as well.
    message = event["logentry"]["message"] % tuple(event["logentry"]["params"])
    assert message.startswith(f"task.worker_lost id={killed.id} ")
    assert event["fingerprint"] == ["delaytasks", "task.worker_lost", "sentry.kills"]


def test_without_the_integration_failures_have_exceptions(site: ReportingSite) -> None:
    worker = site.worker(DELAYTASKS_TEST_SENTRY="default")
    [task] = site.run("sentry.fails")
    [event] = site.items("event", 1)
    [error] = event["exception"]["values"]
    assert error["value"] == f"order {task.id} is broken"
    assert error["stacktrace"]["frames"][-1]["function"] == "fails"
    assert "in fails" in worker.log()
