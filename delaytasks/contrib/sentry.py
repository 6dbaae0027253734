"""Reports failed tasks to Sentry, and continues traces from the scheduling call.

Needs the extra `sentry`. See docs/monitor.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from celery import signals

from delaytasks.model.text import needs_extra

with needs_extra("sentry", "delaytasks.contrib.sentry"):
    import sentry_sdk
    from sentry_sdk.integrations import Integration
    from sentry_sdk.scope import add_global_event_processor
    from sentry_sdk.utils import event_from_exception

from delaytasks.contrib.run_signals import connect_runs
from delaytasks.db.producer import trace_sources
from delaytasks.model.inputs import MAX_VALUE_LENGTH
from delaytasks.model.task import DelayedTask

if TYPE_CHECKING:
    from sentry_sdk._types import Event, Hint

__all__ = ["DelayTasksIntegration"]

ORIGIN = "auto.queue.delaytasks"
#: The pairs of meta that carry the trace.
TRACE_HEADERS = ("sentry-trace", "baggage")

#: What is to be closed after the run of this context.
_run: ContextVar[ExitStack | None] = ContextVar("delaytasks_sentry_run", default=None)


class DelayTasksIntegration(Integration):
    """Reports each failed task once, with its tag, id, key and attempt.

    Examples
    --------
    >>> sentry_sdk.init(dsn, integrations=[DelayTasksIntegration()])
    """

    identifier = "delaytasks"

    @staticmethod
    def setup_once() -> None:
        """Called by `sentry_sdk.init` for the first client of a process."""
        add_global_event_processor(_drop_repeated)
        trace_sources.append(_trace_of_call)
        connect_runs(_started, _ended, _left)
        signals.worker_process_shutdown.connect(_flush, weak=False)


def _is_active() -> bool:
    """Return whether the current client has the integration."""
    return sentry_sdk.get_client().get_integration(DelayTasksIntegration) is not None


# -- scheduling -----------------------------------------------------------------------------------


def _trace_of_call(tag: str, tasks: Sequence[DelayedTask]) -> Mapping[str, str]:
    """Return the trace of the caller for the meta of new tasks."""
    if not _is_active():
        return {}
    with sentry_sdk.start_span(op="queue.publish", name=tag, origin=ORIGIN) as span:
        span.set_data("messaging.system", "delaytasks")
        span.set_data("messaging.destination.name", tasks[0].queue)
        if len(tasks) == 1:
            span.set_data("messaging.message.id", str(tasks[0].id))
        else:
            span.set_data("messaging.batch.message_count", len(tasks))
        trace, baggage = sentry_sdk.get_traceparent(), sentry_sdk.get_baggage()
    pairs = dict(zip(TRACE_HEADERS, (trace, baggage), strict=True))
    return {name: text for name, text in pairs.items() if text and len(text) <= MAX_VALUE_LENGTH}


# -- runs -----------------------------------------------------------------------------------------


def _started(request: Any) -> None:
    if not _is_active():
        return
    task: DelayedTask = request.delay_task
    stack = ExitStack()
    scope = stack.enter_context(sentry_sdk.isolation_scope())
    scope.clear_breadcrumbs()
    _describe(scope, task)
    headers = {name: text for name, text in task.meta.items() if name in TRACE_HEADERS}
    transaction = sentry_sdk.continue_trace(
        headers, op="queue.process", name=task.tag, source="task", origin=ORIGIN
    )
    stack.enter_context(sentry_sdk.start_transaction(transaction))
    span = sentry_sdk.get_current_span()
    if span is not None:
        span.set_data("messaging.system", "delaytasks")
        span.set_data("messaging.destination.name", task.queue)
        span.set_data("messaging.message.id", str(task.id))
        span.set_data("messaging.message.retry.count", task.runs - 1)
    _run.set(stack)


def _ended(request: Any, state: str, error: BaseException | None) -> None:
    if _run.get() is None or not _is_active():
        return
    if state == "FAILURE" and error is not None:
        with sentry_sdk.new_scope() as scope:
            _describe(scope, request.delay_task)  # of a batch's task that is not the first one
            _capture(request.delay_task, error)
    span = sentry_sdk.get_current_span()
    if span is not None:
        span.set_status("ok" if state == "SUCCESS" else "internal_error")


def _left(request: Any) -> None:
    if (run := _run.get()) is not None:
        _run.set(None)
        run.close()


def _describe(scope: sentry_sdk.Scope, task: DelayedTask) -> None:
    """Add what identifies the task to all events of a scope. The body may be confidential."""
    scope.set_transaction_name(task.tag, source="task")
    known = {
        "id": str(task.id),
        "tag": task.tag,
        "key": task.key,
        "queue": task.queue,
        "attempt": str(task.runs),
    }
    for name, value in known.items():
        if value is not None:
            scope.set_tag(f"delaytasks.{name}", value)
    more = {
        "lost_leases": task.lapses,
        "due": task.due.isoformat(),
        "meta": {name: text for name, text in task.meta.items() if name not in TRACE_HEADERS},
    }
    scope.set_context("delaytasks", {**known, **more})


def _capture(task: DelayedTask, error: BaseException) -> None:
    """Report the failure of a task, grouped by its tag in addition to the usual grouping."""
    event, hint = event_from_exception(
        error,
        client_options=sentry_sdk.get_client().options,
        mechanism={"type": "delaytasks", "handled": False},
    )
    event["fingerprint"] = ["{{ default }}", task.tag]
    sentry_sdk.capture_event(event, hint=hint)


def _drop_repeated(event: Event, hint: Hint) -> Event | None:
    """Drop the log entries of failures that this module reports itself, and group other entries.

    Sentry makes events of log entries at ERROR, also of a task that failed because its workers
    died. All entries of one event of delaytasks about a tag should be one issue.
    """
    record = (hint or {}).get("log_record")
    name = getattr(record, "event_name", None)
    if name == "task.failed" and _run.get() is not None:
        return None
    if name is not None and not event.get("exception"):
        event["fingerprint"] = ["delaytasks", name, getattr(record, "event_tag", "")]
    return event


def _flush(**_: Any) -> None:
    """Send what is left: a process of a prefork pool ends without Python's exit handlers."""
    sentry_sdk.flush(timeout=2)
