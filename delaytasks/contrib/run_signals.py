"""Celery's signals about the runs of delayed tasks, for the integrations with tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import signals

#: Is called with the request of a run that begins.
OnStart = Callable[[Any], None]
#: Is called with the request of a task that ended, with the state in Celery, such as FAILURE, and
#: with its exception or None.
OnEnd = Callable[[Any, str, BaseException | None], None]


def connect_runs(started: OnStart, ended: OnEnd, left: OnStart) -> Callable[[], None]:
    """Call functions for each run of a delayed task in this process, in the context of the run.

    Celery logs their exceptions.

    Parameters
    ----------
    started
        Called before the processor.
    ended
        Called after the processor, for each task of a batch.
    left
        Called last, with the request of `started`.

    Returns
    -------
    callable
        Ends the calls.
    """

    def end(state: str, name: str = "") -> Callable[..., None]:
        def call(request: Any, fields: dict[str, Any]) -> None:
            error = fields.get(name)
            ended(request, state, error if isinstance(error, BaseException) else None)

        return call

    receivers = [
        _receive(signals.task_prerun, lambda request, _: started(request)),
        _receive(signals.task_success, end("SUCCESS")),
        _receive(signals.task_failure, end("FAILURE", "exception")),
        _receive(signals.task_retry, end("RETRY", "reason")),
        _receive(signals.task_revoked, end("REVOKED")),
        _receive(signals.task_postrun, lambda request, _: left(request)),
    ]

    def disconnect() -> None:
        for signal, receiver in receivers:
            signal.disconnect(receiver)

    return disconnect


def _receive(signal: Any, call: Callable[[Any, dict[str, Any]], None]) -> tuple[Any, Any]:
    """Connect a function to a signal, except for the runs of ordinary Celery tasks."""

    def receiver(sender: Any = None, **fields: Any) -> None:
        request = getattr(sender, "request", None)
        if getattr(request, "delay_task", None) is not None:
            call(request, fields)

    signal.connect(receiver, weak=False)
    return signal, receiver
