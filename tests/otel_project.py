"""A project that OpenTelemetry instruments. Spans go into a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from delaytasks import DelayedTask, Fail, processor
from delaytasks.contrib import opentelemetry

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


if FOLDER in os.environ:
    spans = TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(SpanFile()))
    opentelemetry.instrument(spans)


@processor("otel.works")
def works(body: dict[str, Any]) -> None:
    with trace.get_tracer("shop", tracer_provider=spans).start_as_current_span("inside"):
        pass


@processor("otel.async")
async def works_on_the_loop(body: dict[str, Any]) -> None:
    with trace.get_tracer("shop", tracer_provider=spans).start_as_current_span("in the loop"):
        pass


@processor("otel.fails")
def fails(body: dict[str, Any]) -> None:
    raise ValueError("no order")


@processor("otel.batch", batch=10)
def batch(bodies: list[dict[str, Any]], tasks: list[DelayedTask]) -> dict[int, Any]:
    return {task.id: Fail("odd") for task in tasks if task.body["number"] % 2}
