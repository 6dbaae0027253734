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


class RunReceivers:
    """Calls functions for each run of a delayed task in this process, in the context of the run.

    Celery logs their exceptions.

    Parameters
    ----------
    name
        Distinguishes the integrations. Connecting another object of this name changes nothing.
    started
        Called before the processor.
    ended
        Called after the processor, for each task of a batch.
    left
        Called last, with the request of `started`.
    """

    def __init__(self, name: str, started: OnStart, ended: OnEnd, left: OnStart) -> None:
        self._name = name
        self._started = started
        self._ended = ended
        self._left = left
        self._receivers: tuple[tuple[Any, Callable[..., None]], ...] = (
            (signals.task_prerun, self._on_prerun),
            (signals.task_success, self._on_success),
            (signals.task_failure, self._on_failure),
            (signals.task_retry, self._on_retry),
            (signals.task_revoked, self._on_revoked),
            (signals.task_postrun, self._on_postrun),
        )

    def connect(self) -> None:
        for signal, receiver in self._receivers:
            signal.connect(receiver, weak=False, dispatch_uid=self._uid(signal))

    def disconnect(self) -> None:
        for signal, _ in self._receivers:
            signal.disconnect(dispatch_uid=self._uid(signal))

    def _uid(self, signal: Any) -> str:
        return f"delaytasks-{self._name}-{signal.name}"

    def _on_prerun(self, task: Any = None, **_: Any) -> None:
        if (request := _request_of(task)) is not None:
            self._started(request)

    def _on_postrun(self, task: Any = None, **_: Any) -> None:
        if (request := _request_of(task)) is not None:
            self._left(request)

    def _on_success(self, sender: Any = None, **_: Any) -> None:
        self._end(sender, "SUCCESS", None)

    def _on_failure(self, sender: Any = None, exception: Any = None, **_: Any) -> None:
        self._end(sender, "FAILURE", exception)

    def _on_retry(self, sender: Any = None, reason: Any = None, **_: Any) -> None:
        self._end(sender, "RETRY", reason if isinstance(reason, BaseException) else None)

    def _on_revoked(self, sender: Any = None, **_: Any) -> None:
        self._end(sender, "REVOKED", None)

    def _end(self, task: Any, state: str, error: BaseException | None) -> None:
        if (request := _request_of(task)) is not None:
            self._ended(request, state, error)


def _request_of(task: Any) -> Any:
    """Return the request of a delayed task, or None for an ordinary Celery task."""
    request = getattr(task, "request", None)
    return request if getattr(request, "delay_task", None) is not None else None
