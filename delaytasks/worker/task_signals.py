"""Celery's signals about the end of a row's run. They follow the move of the row, whatever its processor returned or
raised, so that what hangs on them (Sentry, OpenTelemetry, metrics) and the row say the same."""

from __future__ import annotations

from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals, states
from celery.exceptions import Retry

from delaytasks.core.errors import TaskFailedError
from delaytasks.core.outcomes import Done
from delaytasks.execution.executor import Ended

#: What Celery calls the state of a row after each move; any other one means that the row runs again.
_STATES: dict[str, str] = {
    "succeed": states.SUCCESS,
    "fail": states.FAILURE,
    "withdraw": states.REVOKED,
    "expire": states.REVOKED,
}
_SIGNALS = {
    states.SUCCESS: signals.task_success,
    states.FAILURE: signals.task_failure,
    states.REVOKED: signals.task_revoked,
    states.RETRY: signals.task_retry,
}


def state_of(ended: Ended) -> str:
    return _STATES.get(ended.settlement.move, str(states.RETRY))


def has_receivers(state: str) -> bool:
    return bool(_SIGNALS[state].receivers)


def result_of(ended: Ended) -> Any:
    """What Celery calls the return value of the run: an exception if the run did not succeed."""
    if state_of(ended) == states.SUCCESS:
        return ended.value.result if isinstance(ended.value, Done) else ended.value
    if ended.error is not None:
        return ended.error
    why = ended.settlement.error or ""
    if state_of(ended) == states.RETRY:
        return Retry(why or "its processor asked for another run", when=ended.settlement.due)
    return TaskFailedError(why, ended.settlement.task.id)


def tell_end(sender: Any, request: Any, ended: Ended, result: Any) -> None:
    """The signal that belongs to the end; `result` is what `result_of` says."""
    state = state_of(ended)
    if state == states.SUCCESS:
        signals.task_success.send(sender=sender, result=result)
    elif state == states.REVOKED:
        signals.task_revoked.send(
            sender=sender, request=request, terminated=False, signum=None, expired=False
        )
    elif state == states.RETRY:
        signals.task_retry.send(sender=sender, request=request, reason=result, einfo=_info(result))
    else:
        info = _info(result)  # first, since it may give the exception its traceback
        signals.task_failure.send(
            sender=sender,
            task_id=request.id,
            exception=result,
            args=request.args,
            kwargs={},
            traceback=result.__traceback__,
            einfo=info,
        )


def _info(error: BaseException) -> Any:
    if (
        error.__traceback__ is None
    ):  # nobody raised it, and Celery's form of a traceback has at least one frame
        try:
            raise error
        except BaseException:
            pass
    return ExceptionInfo((type(error), error, error.__traceback__))
