"""Celery's signals about a task's run.

Those about its end follow the move of the row, whatever its processor returned or raised. So the
row agrees with the receivers (Sentry, OpenTelemetry, metrics).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals, states
from celery.exceptions import Retry

from delaytasks.core.errors import TaskFailedError
from delaytasks.core.task import Done
from delaytasks.execution.executor import RunResult

_SIGNALS = {
    states.SUCCESS: signals.task_success,
    states.FAILURE: signals.task_failure,
    states.REVOKED: signals.task_revoked,
    states.RETRY: signals.task_retry,
}


def send_prerun(sender: Any, request: Any) -> None:
    if signals.task_prerun.receivers:
        signals.task_prerun.send(
            sender=sender,
            task_id=request.id,
            task=sender,
            args=request.args,
            kwargs=request.kwargs,
        )


def send_postrun(sender: Any, request: Any, ends: Sequence[RunResult]) -> None:
    """Send the signal after a run. `ends` is empty if its settlement failed."""
    if signals.task_postrun.receivers:
        signals.task_postrun.send(
            sender=sender,
            task_id=request.id,
            task=sender,
            args=request.args,
            kwargs=request.kwargs,
            retval=result_of(ends[0]) if ends else None,
            state=state_of(ends[0]) if ends else states.FAILURE,
        )


def state_of(ended: RunResult) -> str:
    return ended.settlement.ending.celery_state


def has_receivers(state: str) -> bool:
    return bool(_SIGNALS[state].receivers)


def result_of(ended: RunResult) -> Any:
    """Return what Celery calls the return value: an exception if the run did not succeed."""
    if state_of(ended) == states.SUCCESS:
        return ended.value.result if isinstance(ended.value, Done) else ended.value
    if ended.error is not None:
        return ended.error
    why = ended.settlement.error or ""
    if state_of(ended) == states.RETRY:
        return Retry(
            why or "its processor requested another run", when=ended.settlement.expected_time
        )
    return TaskFailedError(why, ended.settlement.task.id)


def send_end(sender: Any, request: Any, ended: RunResult, result: Any) -> None:
    """Send the signal for this end. `result` is what `result_of` returns."""
    state = state_of(ended)
    if state == states.SUCCESS:
        signals.task_success.send(sender=sender, result=result)
    elif state == states.REVOKED:
        signals.task_revoked.send(
            sender=sender, request=request, terminated=False, signum=None, expired=False
        )
    elif state == states.RETRY:
        einfo = _exception_info(result)
        signals.task_retry.send(sender=sender, request=request, reason=result, einfo=einfo)
    else:
        _send_failure(sender, request, result)


def _send_failure(sender: Any, request: Any, error: BaseException) -> None:
    """Send the signal while the exception is handled, as Celery does.

    Some receivers, such as that of Elastic APM, read the exception with `sys.exc_info()`.
    """
    einfo = _exception_info(error)  # first, since it may add the exception's traceback
    traceback = error.__traceback__
    try:
        raise error
    except BaseException:
        error.__traceback__ = traceback  # without this function
        signals.task_failure.send(
            sender=sender,
            task_id=request.id,
            exception=error,
            args=request.args,
            kwargs={},
            traceback=traceback,
            einfo=einfo,
        )


def _exception_info(error: BaseException) -> Any:
    if error.__traceback__ is None:
        # It was never raised, and Celery's form of a traceback needs at least one frame.
        try:
            raise error
        except BaseException:
            pass
    return ExceptionInfo((type(error), error, error.__traceback__))
