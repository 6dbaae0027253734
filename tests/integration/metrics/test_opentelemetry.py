"""Spans of workers with the real SDK of OpenTelemetry."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayedTask
from tests.running import Deployment, Process, quick
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from delaytasks.contrib import opentelemetry

pytestmark = pytest.mark.slow
pools = pytest.mark.parametrize("pool", [quick("prefork"), "threads"])


class TracedSite(Deployment):
    def __init__(self, folder: Path, database_url: str, broker_url: str) -> None:
        conf = {"imports": ["tests.project", "tests.otel_project"]}
        super().__init__(folder, database_url, broker_url, conf)
        self.spans_here = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans_here))
        self.tracer = provider.get_tracer("shop")
        opentelemetry.instrument(provider)

    def worker(self, *options: str, **more: Any) -> Process:
        return super().worker(*options, DELAYTASKS_TEST_TELEMETRY=str(self.folder), **more)

    def ended(self, *tasks: DelayedTask) -> None:
        """Wait for the end of tasks."""
        wait_until(lambda: all(self.delays.get(task).is_finished for task in tasks), 30, self.logs)

    def spans(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Return the worker's spans of this name as soon as there are `count`."""
        file = self.folder / "spans.jsonl"

        def read() -> list[dict[str, Any]]:
            lines = file.read_text().splitlines() if file.exists() else []
            return [span for span in map(json.loads, lines) if span["name"] == name]

        wait_until(lambda: len(read()) >= count, 20, f"{count} spans {name}", every_s=0.05)
        return read()


@pytest.fixture
def site(tmp_path: Path, postgresql_url: str, redis_url: str) -> Iterator[TracedSite]:
    made = TracedSite(tmp_path, postgresql_url, redis_url)
    yield made
    opentelemetry.uninstrument()
    made.close()


@pools
def test_the_span_of_a_run_links_to_the_span_of_its_call(site: TracedSite, pool: str) -> None:
    body = {"file": str(site.file)}
    batch = [site.delays.schedule_delay("otel.batch", {**body, "number": n}, 3) for n in range(4)]
    of_batch = site.spans_here.get_finished_spans()
    site.worker(pool=pool)
    with site.tracer.start_as_current_span("POST /orders") as request:
        task = site.schedule("otel.works", key="order-7", queue="mail")
    *_, created, _ = site.spans_here.get_finished_spans()
    others = [site.schedule(tag) for tag in ("otel.fails", "otel.async")]
    site.ended(task, *others, *batch)
    assert created.name == "schedule otel.works"
    assert created.kind.name == "PRODUCER"
    assert created.parent is not None
    assert created.parent.span_id == request.get_span_context().span_id
    [run] = site.spans("process otel.works")
    assert run["kind"] == "SpanKind.CONSUMER"
    assert run["parent_id"] is None
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
    [inside] = site.spans("inside")
    assert inside["parent_id"] == run["context"]["span_id"]
    assert run["status"]["status_code"] == "UNSET"
    [failed] = site.spans("process otel.fails")
    assert failed["status"]["status_code"] == "ERROR"
    assert failed["attributes"]["error.type"] == "ValueError"
    [event] = failed["events"]
    assert event["name"] == "exception"
    assert event["attributes"]["exception.message"] == "no order"
    assert "in fails" in event["attributes"]["exception.stacktrace"]
    [run], [inside] = site.spans("process otel.async"), site.spans("in the loop")
    assert inside["parent_id"] == run["context"]["span_id"], "the coroutine runs within its span"
    runs = site.spans("process otel.batch")
    links = {each["context"]["span_id"] for run in runs for each in run["links"]}
    assert links == {f"0x{span.context.span_id:016x}" for span in of_batch}, "one to each call"
    assert len(links) == 4


def test_a_run_can_continue_the_trace_of_its_scheduling_call(site: TracedSite) -> None:
    site.worker(DELAYTASKS_TEST_CONTINUES_TRACE="1")
    site.ended(site.schedule("otel.works"))
    [created] = site.spans_here.get_finished_spans()
    [run] = site.spans("process otel.works")
    assert int(run["parent_id"], 16) == created.context.span_id
    assert int(run["context"]["trace_id"], 16) == created.context.trace_id
    assert run["links"] == []


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
    site.ended(site.schedule("otel.prompt"))
    wait_until(lambda: '"name": "process otel.prompt"' in worker.log(), 20, worker.log)


def test_one_call_for_many_tasks_is_one_span(site: TracedSite) -> None:
    items: list[Any] = [("otel.works", {}, 3600), ("otel.fails", {}, 3600)] * 50
    site.delays.schedule_many(items)
    spans = {span.name: span for span in site.spans_here.get_finished_spans()}
    assert sorted(spans) == ["schedule otel.fails", "schedule otel.works"]
    attributes = spans["schedule otel.works"].attributes
    assert attributes is not None
    assert attributes["messaging.batch.message_count"] == 50
