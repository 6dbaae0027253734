"""A project that OpenTelemetry instruments. Spans and metrics go into files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from celery.signals import worker_ready
from opentelemetry import trace
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from delaytasks import DelayTask, Fail, processor
from delaytasks.contrib import opentelemetry
from tests.doc_pages import block_beginning

FOLDER = "DELAYTASKS_TEST_TELEMETRY"


def write(kind: str, text: str) -> None:
    """Append a line, which the operating system writes as a whole."""
    with open(os.path.join(os.environ[FOLDER], f"{kind}.jsonl"), "a") as file:
        file.write(text.replace("\n", " ") + "\n")


class SpanFile(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            write("spans", span.to_json(indent=None))
        return SpanExportResult.SUCCESS


class MetricFile(MetricExporter):
    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any
    ) -> MetricExportResult:
        write(f"metrics-{os.getpid()}", metrics_data.to_json(indent=None))
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None: ...


if FOLDER in os.environ:
    spans = TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(SpanFile()))
    metrics = MeterProvider([PeriodicExportingMetricReader(MetricFile(), 200)])
    continues_trace = "DELAYTASKS_TEST_CONTINUES_TRACE" in os.environ
    opentelemetry.instrument(spans, metrics, continues_trace=continues_trace)
    set_meter_provider(metrics)
    documented = block_beginning("docs/tracing.md", "@worker_ready")
    exec(documented.text, {"worker_ready": worker_ready, "opentelemetry": opentelemetry})


@processor("otel.works")
def works(body: dict[str, Any]) -> None:
    with trace.get_tracer("shop", tracer_provider=spans).start_as_current_span("inside"):
        pass


@processor("otel.prompt", on_time="1h")
def begin_on_time(body: dict[str, Any]) -> None:
    """Is on time on any machine."""


@processor("otel.async")
async def works_on_the_loop(body: dict[str, Any]) -> None:
    with trace.get_tracer("shop", tracer_provider=spans).start_as_current_span("in the loop"):
        pass


@processor("otel.fails")
def fails(body: dict[str, Any]) -> None:
    raise ValueError("no order")


@processor("otel.batch", batch=10)
def batch(bodies: list[dict[str, Any]], tasks: list[DelayTask]) -> dict[int, Any]:
    return {task.id: Fail("odd") for task in tasks if task.body["number"] % 2}
