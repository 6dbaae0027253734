"""Spans of calls and runs with the real SDK of OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from delaytasks import DelayedTask, DelayTasks
from tests.integration.conftest import Deploy
from tests.waiting import wait_until
from tests.world.recording import delays_on, make_tables, record, runner_of

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from delaytasks.contrib import opentelemetry


@pytest.fixture
def provider() -> Iterator[Any]:
    """Instrument this process, and yield a provider, which has its spans as `found()`."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    provider.found = spans.get_finished_spans  # type: ignore[attr-defined]
    opentelemetry.instrument(provider)
    yield provider
    opentelemetry.uninstrument()


@pytest.fixture
def delays(sqlite_path: Callable[[], str]) -> Iterator[DelayTasks]:
    with closing(delays_on(sqlite_path(), tags="any")) as made:
        make_tables(made)
        record(made)
        yield made


def test_the_span_of_a_run_links_to_the_span_of_its_call(delays: DelayTasks, provider: Any) -> None:
    tracer = provider.get_tracer("shop")

    @delays.processor("works")
    def works(body: Any) -> None:
        with tracer.start_as_current_span("inside"):
            pass

    @delays.processor("async")
    async def works_on_the_loop(body: Any) -> None:
        with tracer.start_as_current_span("in the loop"):
            pass

    @delays.processor("fails")
    def fails(body: Any) -> None:
        raise ValueError("no order")

    @delays.processor("batch", batch=10)
    def batch(bodies: list[Any], tasks: list[DelayedTask]) -> None: ...

    delays.schedule_many([("works", {}, 3600), ("fails", {}, 3600)] * 50)
    of_many = {span.name: span.attributes for span in provider.found()}
    assert sorted(of_many) == ["schedule fails", "schedule works"], "one for each tag"
    assert of_many["schedule works"]["messaging.batch.message_count"] == 50
    with tracer.start_as_current_span("POST /orders") as request:
        task = delays.schedule_delay("works", {}, 0, key="order-7")
    *_, created, _ = provider.found()
    assert (created.name, created.kind.name) == ("schedule works", "PRODUCER")
    assert created.parent.span_id == request.get_span_context().span_id
    for tag in ("fails", "async", *["batch"] * 4):
        delays.schedule_delay(tag, {}, 0)
    of_batch = [span for span in provider.found() if span.name == "schedule batch"]
    while runner_of(delays).run_due("default", range(10), 100).claimed:
        pass

    spans = {span.name: span for span in provider.found()}
    run, failed = spans["process works"], spans["process fails"]
    assert (run.kind.name, run.parent) == ("CONSUMER", None)
    [link] = run.links
    of_call, of_link = created.context, link.context
    assert (of_link.trace_id, of_link.span_id) == (of_call.trace_id, of_call.span_id)
    of_messaging = {
        "system": "delaytasks", "operation.name": "process", "operation.type": "process",
        "destination.name": "default", "message.id": str(task.id),
    }  # fmt: skip
    own = {"tag": "works", "key": "order-7", "attempt": 1, "outcome": "done"}
    wanted = {f"messaging.{name}": value for name, value in of_messaging.items()}
    assert run.attributes == wanted | {f"delaytasks.{key}": value for key, value in own.items()}
    assert [each.status.status_code.name for each in (run, failed)] == ["UNSET", "ERROR"]
    assert failed.attributes["error.type"] == "ValueError"
    assert [each.attributes["exception.message"] for each in failed.events] == ["no order"]
    for tag, inside in (("works", "inside"), ("async", "in the loop")):
        assert spans[inside].parent.span_id == spans[f"process {tag}"].context.span_id
    linked = {link.context.span_id for link in spans["process batch"].links}
    assert linked == {span.context.span_id for span in of_batch}, "one to each call"


#: Runs the command of this name. In the log are then the spans of each process.
OPENTELEMETRY_INSTRUMENT = """
from opentelemetry.instrumentation.auto_instrumentation import run
run()
"""
INTO_THE_LOG = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "100"}
INTO_THE_LOG |= {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


@pytest.mark.slow
def test_the_command_opentelemetry_instrument_needs_no_code_of_the_user(deploy: Deploy) -> None:
    pytest.importorskip("opentelemetry.distro")
    d = deploy()
    (d.folder / "opentelemetry_instrument.py").write_text(OPENTELEMETRY_INSTRUMENT)
    command = [sys.executable, *"-m celery -A delaytasks worker -c 1".split()]
    worker = d.python("instrumented", "opentelemetry_instrument", *command, **INTO_THE_LOG)
    d.schedule("test.quiet")
    wait_until(lambda: '"name": "process test.quiet"' in worker.log(), 40, worker.log)
