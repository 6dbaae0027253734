"""Celery's signals about the runs of delayed tasks, for the integrations with tracers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
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

    connected = ExitStack()

    def connect(signal: Any, call: Callable[[Any, dict[str, Any]], None]) -> None:
        def receive(sender: Any = None, **fields: Any) -> None:
            request = getattr(sender, "request", None)
            if getattr(request, "delay_task", None) is not None:  # not an ordinary Celery task
                call(request, fields)

        signal.connect(receive, weak=False)
        connected.callback(signal.disconnect, receive)

    connect(signals.task_prerun, lambda request, _: started(request))
    connect(signals.task_success, lambda request, _: ended(request, "SUCCESS", None))
    connect(signals.task_failure, lambda r, fields: ended(r, "FAILURE", fields["exception"]))
    connect(signals.task_retry, lambda r, fields: ended(r, "RETRY", fields["reason"]))
    connect(signals.task_revoked, lambda request, _: ended(request, "REVOKED", None))
    connect(signals.task_postrun, lambda request, _: left(request))
    return connected.close
