"""Spans of workers with the real SDK of OpenTelemetry."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from delaytasks import DelayedTask
from tests.integration.conftest import Deploy
from tests.running import Deployment, Process, quick
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from delaytasks.contrib import opentelemetry

pytestmark = pytest.mark.slow


class TracedSite(Deployment):
    def worker(self, *options: str, **more: Any) -> Process:
        return super().worker(*options, DELAYTASKS_TEST_TELEMETRY=str(self.folder), **more)

    def end(self, *tasks: DelayedTask) -> None:
        """Wait for the end of tasks."""
        wait_until(lambda: all(self.delays.get(task).is_finished for task in tasks), 30, self.logs)

    def spans(self, name: str) -> list[dict[str, Any]]:
        """Return the worker's spans of this name as soon as there are some."""
        file = self.folder / "spans.jsonl"

        def read() -> list[dict[str, Any]]:
            lines = file.read_text().splitlines() if file.exists() else []
            return [span for span in map(json.loads, lines) if span["name"] == name]

        return wait_until(read, 20, f"spans {name}", every_s=0.05)


@pytest.fixture
def site(deploy: Deploy) -> TracedSite:
    return deploy(conf={"imports": ["tests.project", "tests.otel_project"]}, kind=TracedSite)


@pytest.fixture
def provider() -> Iterator[Any]:
    """Instrument this process, and yield a provider, which has its spans as `found()`."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    provider.found = spans.get_finished_spans  # type: ignore[attr-defined]
    opentelemetry.instrument(provider)
    yield provider
    opentelemetry.uninstrument()


@pytest.mark.parametrize("pool", [quick("prefork"), "threads"])
def test_the_span_of_a_run_links_to_the_span_of_its_call(
    site: TracedSite, provider: Any, pool: str
) -> None:
    many: list[Any] = [("otel.works", {}, 3600), ("otel.fails", {}, 3600)] * 50
    site.delays.schedule_many(many)
    of_many = {span.name: span.attributes for span in provider.found()}
    assert sorted(of_many) == ["schedule otel.fails", "schedule otel.works"], "one for each tag"
    assert of_many["schedule otel.works"]["messaging.batch.message_count"] == 50
    batch = [site.schedule("otel.batch", 3, body={"number": number}) for number in range(4)]
    of_batch = provider.found()[2:]
    site.worker(pool=pool)
    with provider.get_tracer("shop").start_as_current_span("POST /orders") as request:
        task = site.schedule("otel.works", key="order-7", queue="mail")
    *_, created, _ = provider.found()
    site.end(task, *(site.schedule(tag) for tag in ("otel.fails", "otel.async")), *batch)
    assert (created.name, created.kind.name) == ("schedule otel.works", "PRODUCER")
    assert created.parent.span_id == request.get_span_context().span_id

    [run] = site.spans("process otel.works")
    assert (run["kind"], run["parent_id"]) == ("SpanKind.CONSUMER", None)
    [link] = run["links"]
    assert int(link["context"]["span_id"], 16) == created.context.span_id
    assert int(link["context"]["trace_id"], 16) == created.context.trace_id
    assert run["context"]["trace_id"] != link["context"]["trace_id"]
    of_messaging = {
        "system": "delaytasks", "operation.name": "process", "operation.type": "process",
        "destination.name": "mail", "message.id": str(task.id),
    }  # fmt: skip
    own = {"tag": "otel.works", "key": "order-7", "attempt": 1, "outcome": "done"}
    wanted = {f"messaging.{name}": value for name, value in of_messaging.items()}
    assert run["attributes"] == wanted | {f"delaytasks.{key}": value for key, value in own.items()}
    assert run["status"]["status_code"] == "UNSET"
    [failed] = site.spans("process otel.fails")
    assert failed["status"]["status_code"] == "ERROR"
    assert failed["attributes"]["error.type"] == "ValueError"
    [event] = failed["events"]
    assert event["name"] == "exception"
    assert event["attributes"]["exception.message"] == "no order"
    assert "in fails" in event["attributes"]["exception.stacktrace"]
    for tag, inside in (("otel.works", "inside"), ("otel.async", "in the loop")):
        [run], [child] = site.spans(f"process {tag}"), site.spans(inside)
        assert child["parent_id"] == run["context"]["span_id"], tag
    links = [link for run in site.spans("process otel.batch") for link in run["links"]]
    ids = sorted(int(link["context"]["span_id"], 16) for link in links)
    assert ids == sorted(span.context.span_id for span in of_batch), "one to each call"


#: Runs the command of this name. In the log are then the spans of each process.
OPENTELEMETRY_INSTRUMENT = """
from opentelemetry.instrumentation.auto_instrumentation import run
run()
"""
INTO_THE_LOG = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "100"}
INTO_THE_LOG |= {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


def test_the_command_opentelemetry_instrument_needs_no_code_of_the_user(site: TracedSite) -> None:
    pytest.importorskip("opentelemetry.distro")
    (site.folder / "opentelemetry_instrument.py").write_text(OPENTELEMETRY_INSTRUMENT)
    command = [sys.executable, *"-m celery -A delaytasks worker -c 1".split()]
    worker = site.python("instrumented", "opentelemetry_instrument", *command, **INTO_THE_LOG)
    site.schedule("test.quiet")
    wait_until(lambda: '"name": "process test.quiet"' in worker.log(), 40, worker.log)
