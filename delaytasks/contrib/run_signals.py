"""Celery's signals about the runs of delayed tasks, for the integrations with tracers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any

from celery import signals

from delaytasks.model.task import DelayedTask

#: Is called with a task that ended, with its state in Celery, such as FAILURE, and with its
#: exception or None.
OnEnd = Callable[[DelayedTask, str, BaseException | None], None]

#: The signal of each state in which a task ends, and its field that has the exception.
_ENDS = (
    (signals.task_success, "SUCCESS", ""),
    (signals.task_failure, "FAILURE", "exception"),
    (signals.task_retry, "RETRY", "reason"),
    (signals.task_revoked, "REVOKED", ""),
)


def follow_runs(around: Callable[[Any], AbstractContextManager[OnEnd]]) -> Callable[[], None]:
    """Enter `around(request)` around each run of a delayed task in this process.

    Parameters
    ----------
    around
        Is called with the request in Celery. The value of its context is called for each task of
        the run, after the processor. Celery logs exceptions.

    Returns
    -------
    callable
        Ends this.
    """
    connected = ExitStack()
    #: The run of each context.
    current = ContextVar[tuple[ExitStack, OnEnd] | None]("delaytasks_followed_run", default=None)

    def connect(signal: Any, call: Callable[[Any, dict[str, Any]], None]) -> None:
        def receive(sender: Any = None, **fields: Any) -> None:
            request = getattr(sender, "request", None)
            if getattr(request, "delay_task", None) is not None:  # not an ordinary Celery task
                call(request, fields)

        signal.connect(receive, weak=False)
        connected.callback(signal.disconnect, receive)

    def begin(request: Any, _: Any) -> None:
        run = ExitStack()
        current.set((run, run.enter_context(around(request))))

    def end(state: str, error: str, request: Any, fields: dict[str, Any]) -> None:
        if (found := current.get()) is not None:
            _, ended = found
            ended(request.delay_task, state, fields.get(error))

    def leave(request: Any, _: Any) -> None:
        if (found := current.get()) is not None:
            current.set(None)
            found[0].close()

    connect(signals.task_prerun, begin)
    for signal, state, error in _ENDS:
        connect(signal, partial(end, state, error))
    connect(signals.task_postrun, leave)
    return connected.close


def messaging_fields(tasks: Sequence[DelayedTask]) -> Mapping[str, str | int]:
    """Return what a span says about a message: one task, or several ones of a tag.

    The names are OpenTelemetry's. The body is left out, because it may be confidential.
    """
    found = {"messaging.system": "delaytasks", "messaging.destination.name": tasks[0].queue}
    if len(tasks) > 1:
        return {**found, "messaging.batch.message_count": len(tasks)}
    return {**found, "messaging.message.id": str(tasks[0].id)}
