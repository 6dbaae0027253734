"""Producer spans of scheduling calls, consumer spans of runs, and metrics of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery import current_app
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider, get_meter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from delaytasks.contrib.opentelemetry.attributes import (
    CREATE,
    PROCESS,
    common_attributes,
    span_attributes,
)
from delaytasks.contrib.run_signals import RunReceivers
from delaytasks.core.clock import monotonic
from delaytasks.core.histograms import DURATION_BOUNDS_S, LATENESS_BOUNDS_S
from delaytasks.core.meta import MAX_VALUE_LENGTH
from delaytasks.core.task import DelayTask
from delaytasks.core.trace_meta import add_trace_source, remove_trace_source
from delaytasks.wiring import wiring_of

TRACER_NAME = "delaytasks"
#: The outcome of a run, by the state of a Celery task that ends in this way.
OUTCOME_OF_STATE = {
    "SUCCESS": "done",
    "FAILURE": "failed",
    "RETRY": "retried",
    "REVOKED": "cancelled",
}
_TRACE_CONTEXT = TraceContextTextMapPropagator()


class _TracedRun(NamedTuple):
    span: Span
    token: Any
    began: float


class _Instruments:
    """Creates the spans and the measurements."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        continues_trace: bool,
    ) -> None:
        self._tracer = trace.get_tracer(TRACER_NAME, tracer_provider=tracer_provider)
        self._continues_trace = continues_trace
        #: The run of each context.
        self._run: ContextVar[_TracedRun | None] = ContextVar(
            "delaytasks_opentelemetry", default=None
        )
        meter = get_meter(TRACER_NAME, meter_provider=meter_provider)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Tasks that were scheduled."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Runs of tasks that have ended."
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of the calls of processors.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )
        self._lateness = meter.create_histogram(
            "delaytasks.lateness",
            "s",
            "Time from the due time of a task to the start of its run.",
            explicit_bucket_boundaries_advisory=LATENESS_BOUNDS_S,
        )
        self.receivers = RunReceivers("opentelemetry", self.started, self.ended, self.left)

    def scheduled(self, tag: str, tasks: Sequence[DelayTask]) -> Mapping[str, str]:
        """Make the producer span of a call, and return its context for the meta of the tasks."""
        with self._tracer.start_as_current_span(
            f"{CREATE} {tag}", kind=SpanKind.PRODUCER, attributes=span_attributes(tasks, CREATE)
        ):
            self._sent.add(len(tasks), common_attributes(tasks[0], CREATE))
            carrier: dict[str, str] = {}
            _TRACE_CONTEXT.inject(carrier)
        return {name: text for name, text in carrier.items() if len(text) <= MAX_VALUE_LENGTH}

    def started(self, request: Any) -> None:
        tasks: Sequence[DelayTask] = request.delay_tasks
        contexts = [_TRACE_CONTEXT.extract(task.meta, Context()) for task in tasks]
        creators = [trace.get_current_span(one).get_span_context() for one in contexts]
        by_span = {creator.span_id: creator for creator in creators if creator.is_valid}
        links = [Link(creator) for creator in by_span.values()]
        is_child = self._continues_trace and len(links) == 1
        # An empty context begins a new trace: that of the call may have ended days ago.
        span = self._tracer.start_span(
            f"{PROCESS} {tasks[0].tag}",
            contexts[0] if is_child else Context(),
            kind=SpanKind.CONSUMER,
            links=() if is_child else links,
            attributes=span_attributes(tasks, PROCESS),
        )
        token = otel_context.attach(trace.set_span_in_context(span))
        self._run.set(_TracedRun(span, token, monotonic()))
        delays = getattr(current_app, "delaytasks", None)
        if delays is not None:
            now = wiring_of(delays).clock.now()
            for task in tasks:
                late_s = max((now - task.due).total_seconds(), 0.0)
                self._lateness.record(late_s, common_attributes(task, PROCESS))

    def ended(self, request: Any, state: str, error: BaseException | None) -> None:
        run = self._run.get()
        if run is None:
            return
        task: DelayTask = request.delay_task
        outcome, attributes = OUTCOME_OF_STATE[state], common_attributes(task, PROCESS)
        attributes["delaytasks.outcome"] = outcome
        if len(request.delay_tasks) == 1:
            run.span.set_attribute("delaytasks.outcome", outcome)
        if state in ("FAILURE", "RETRY") and error is not None:
            attributes["error.type"] = type(error).__qualname__
            run.span.record_exception(error, {"messaging.message.id": str(task.id)})
        if state == "FAILURE":
            run.span.set_status(Status(StatusCode.ERROR, str(error)))
            run.span.set_attribute("error.type", type(error).__qualname__)
        self._consumed.add(1, attributes)
        self._duration.record(monotonic() - run.began, attributes)

    def left(self, _: Any) -> None:
        run = self._run.get()
        if run is not None:
            self._run.set(None)
            otel_context.detach(run.token)
            run.span.end()


_instruments: _Instruments | None = None


def instrument(
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    *,
    continues_trace: bool = False,
) -> None:
    """Make spans and metrics for all delayed tasks of this process from now on.

    Call it in the processes that schedule tasks and in those of the workers' pools.

    Parameters
    ----------
    tracer_provider, meter_provider
        By default the global ones.
    continues_trace
        Whether a run belongs to the trace of the call that has scheduled the task. By default each
        run is a trace of its own with a link to the call, since days may be between them.

    Examples
    --------
    >>> @worker_process_init.connect(weak=False)
    ... def set_up(**_):
    ...     trace.set_tracer_provider(provider())
    ...     instrument()
    """
    global _instruments
    uninstrument()
    _instruments = _Instruments(tracer_provider, meter_provider, continues_trace)
    add_trace_source(_instruments.scheduled)
    _instruments.receivers.connect()


def uninstrument() -> None:
    """Make no more spans and metrics in this process.

    Examples
    --------
    >>> uninstrument()
    """
    global _instruments
    if _instruments is not None:
        remove_trace_source(_instruments.scheduled)
        _instruments.receivers.disconnect()
        _instruments = None
