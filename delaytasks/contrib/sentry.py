"""Reports failed tasks to Sentry, and continues traces from the scheduling call.

Needs the extra `sentry`. See docs/monitor.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import signals

from delaytasks.model.text import needs_extra

with needs_extra("sentry", "delaytasks.contrib.sentry"):
    import sentry_sdk
    from sentry_sdk.integrations import Integration
    from sentry_sdk.scope import add_global_event_processor
    from sentry_sdk.utils import event_from_exception

from delaytasks.contrib.run_signals import OnEnd, follow_runs, messaging_fields
from delaytasks.db.producer import trace_sources
from delaytasks.model.inputs import MAX_VALUE_LENGTH
from delaytasks.model.task import DelayedTask

if TYPE_CHECKING:
    from sentry_sdk._types import Event, Hint

__all__ = ["DelayTasksIntegration"]

ORIGIN = "auto.queue.delaytasks"
#: The pairs of meta that carry the trace.
TRACE_HEADERS = ("sentry-trace", "baggage")
#: The tag that all events of a run have.
ID_TAG = "delaytasks.id"


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
        follow_runs(_run)
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
        _describe_span(span, tasks)
        trace, baggage = sentry_sdk.get_traceparent(), sentry_sdk.get_baggage()
    pairs = dict(zip(TRACE_HEADERS, (trace, baggage), strict=True))
    return {name: text for name, text in pairs.items() if text and len(text) <= MAX_VALUE_LENGTH}


# -- runs -----------------------------------------------------------------------------------------


@contextmanager
def _run(request: Any) -> Iterator[OnEnd]:
    """Give a run a scope and a transaction, and report each of its tasks that failed."""
    if not _is_active():
        yield lambda *_: None
        return
    task: DelayedTask = request.delay_task
    headers = {name: text for name, text in task.meta.items() if name in TRACE_HEADERS}
    with sentry_sdk.isolation_scope() as scope:
        scope.clear_breadcrumbs()
        _describe(scope, task)
        transaction = sentry_sdk.continue_trace(
            headers, op="queue.process", name=task.tag, source="task", origin=ORIGIN
        )
        with sentry_sdk.start_transaction(transaction) as span:
            _describe_span(span, [task])
            span.set_data("messaging.message.retry.count", task.runs - 1)

            def ended(task: DelayedTask, state: str, error: BaseException | None) -> None:
                if state == "FAILURE" and error is not None:
                    with sentry_sdk.new_scope() as scope:
                        _describe(scope, task)  # of a batch's task that is not the first one
                        _capture(task, error)
                span.set_status("ok" if state == "SUCCESS" else "internal_error")

            yield ended


def _describe_span(span: Any, tasks: Sequence[DelayedTask]) -> None:
    for name, value in messaging_fields(tasks).items():
        span.set_data(name, value)


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
    if name == "task.failed" and ID_TAG in event.get("tags", {}):
        return None
    if name is not None and not event.get("exception"):
        event["fingerprint"] = ["delaytasks", name, getattr(record, "event_tag", "")]
    return event


def _flush(**_: Any) -> None:
    """Send what is left: a process of a prefork pool ends without Python's exit handlers."""
    sentry_sdk.flush(timeout=2)
