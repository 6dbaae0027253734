"""Producer spans of scheduling calls and consumer spans of runs, for OpenTelemetry.

Needs the extra `opentelemetry`. See docs/monitor.md. Metrics are those of Prometheus, which
OpenTelemetry's collector scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from delaytasks.model.text import needs_extra

with needs_extra("opentelemetry", "delaytasks.contrib.opentelemetry"):
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, Tracer, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from delaytasks.contrib.run_signals import OnEnd, follow_runs, messaging_fields
from delaytasks.db.producer import trace_sources
from delaytasks.model.inputs import MAX_VALUE_LENGTH
from delaytasks.model.task import DelayedTask

__all__ = ["instrument", "uninstrument"]

#: Scheduling creates the message, and a worker processes it.
CREATE, PROCESS = "schedule", "process"
#: The outcome of a run, by the state of a Celery task that ends in this way.
OUTCOME_OF_STATE = {
    "SUCCESS": "done",
    "FAILURE": "failed",
    "RETRY": "retried",
    "REVOKED": "cancelled",
}
_TRACE_CONTEXT = TraceContextTextMapPropagator()


def _attributes(tasks: Sequence[DelayedTask], operation: str) -> Mapping[str, str | int]:
    """Return the attributes of a span about one task or about several ones of a tag."""
    task = tasks[0]
    found = {
        **messaging_fields(tasks),
        "messaging.operation.name": operation,
        "messaging.operation.type": "create" if operation == CREATE else operation,
        "delaytasks.tag": task.tag,
    }
    if len(tasks) == 1 and task.key is not None:
        found["delaytasks.key"] = task.key
    if len(tasks) == 1 and operation == PROCESS:
        found["delaytasks.attempt"] = task.runs
    return found


class _Tracing(NamedTuple):
    """Creates the spans."""

    tracer: Tracer

    def scheduled(self, tag: str, tasks: Sequence[DelayedTask]) -> Mapping[str, str]:
        """Make the producer span of a call, and return its context for the meta of the tasks."""
        with self.tracer.start_as_current_span(
            f"{CREATE} {tag}", kind=SpanKind.PRODUCER, attributes=_attributes(tasks, CREATE)
        ):
            carrier: dict[str, str] = {}
            _TRACE_CONTEXT.inject(carrier)
        return {name: text for name, text in carrier.items() if len(text) <= MAX_VALUE_LENGTH}

    @contextmanager
    def run(self, request: Any) -> Iterator[OnEnd]:
        """Make the consumer span of a run."""
        tasks: Sequence[DelayedTask] = request.delay_tasks
        contexts = [_TRACE_CONTEXT.extract(task.meta, Context()) for task in tasks]
        creators = [trace.get_current_span(one).get_span_context() for one in contexts]
        by_span = {creator.span_id: creator for creator in creators if creator.is_valid}
        links = [Link(creator) for creator in by_span.values()]
        # An empty context begins a new trace: that of the call may have ended days ago.
        with self.tracer.start_as_current_span(
            f"{PROCESS} {tasks[0].tag}",
            Context(),
            kind=SpanKind.CONSUMER,
            links=links,
            attributes=_attributes(tasks, PROCESS),
        ) as span:

            def ended(task: DelayedTask, state: str, error: BaseException | None) -> None:
                if len(tasks) == 1:
                    span.set_attribute("delaytasks.outcome", OUTCOME_OF_STATE[state])
                if error is not None:
                    span.record_exception(error, {"messaging.message.id": str(task.id)})
                if state == "FAILURE":
                    span.set_status(Status(StatusCode.ERROR, str(error)))
                    span.set_attribute("error.type", type(error).__qualname__)

            yield ended


#: What ends the spans of this process.
_ends = ExitStack()


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Make spans for all delayed tasks of this process from now on.

    Call it in the processes that schedule tasks and in those of the workers' pools. Each run is a
    trace of its own with a link to the call that has scheduled the task, since days may be between
    them.

    Parameters
    ----------
    tracer_provider
        By default the global one.

    Examples
    --------
    >>> @worker_process_init.connect(weak=False)
    ... def set_up(**_):
    ...     trace.set_tracer_provider(provider())
    ...     instrument()
    """
    uninstrument()
    tracer = trace.get_tracer("delaytasks", tracer_provider=tracer_provider)
    tracing = _Tracing(tracer)
    trace_sources.append(tracing.scheduled)
    _ends.callback(trace_sources.remove, tracing.scheduled)
    _ends.callback(follow_runs(tracing.run))


def uninstrument() -> None:
    """Make no more spans in this process.

    Examples
    --------
    >>> uninstrument()
    """
    _ends.close()


class DelayTasksInstrumentor:
    """The class that the command `opentelemetry-instrument` finds by its entry point.

    It has the methods of `BaseInstrumentor` that the command calls.
    """

    def instrument(self, tracer_provider: TracerProvider | None = None, **_: Any) -> None:
        instrument(tracer_provider)

    def uninstrument(self, **_: Any) -> None:
        uninstrument()
