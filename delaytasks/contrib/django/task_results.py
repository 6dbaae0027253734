"""Makes the `TaskResult` of a row."""

from __future__ import annotations

import re
from collections.abc import Sequence

from delaytasks.contrib.django.task_calls import TaskCall, in_django
from delaytasks.contrib.django.task_framework import Task, TaskError, TaskResult, TaskResultStatus
from delaytasks.core.states import Status
from delaytasks.core.task import Attempt, DelayTask
from delaytasks.core.text import last_line

#: The states in Django that are not called READY. A cancelled task never succeeds.
_STATES = {
    Status.RUNNING: "RUNNING",
    Status.DONE: "SUCCESSFUL",
    Status.FAILED: "FAILED",
    Status.CANCELLED: "FAILED",
}
#: Another program may write any number of attempts.
MOST_ATTEMPTS = 1000
_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*")


def result_of_row(
    task: Task, call: TaskCall, row: DelayTask, attempts: Sequence[Attempt] = ()
) -> TaskResult:
    """Return the result of a task; `attempts` are the failed attempts of its row."""
    began = row.execution_time if row.attempts else None
    first = next((attempt.began for attempt in attempts if attempt.began), began)
    workers = {attempt.number: attempt.worker or "" for attempt in attempts}
    if row.worker and row.attempts:
        workers[row.attempts] = row.worker
    result = TaskResult(
        task=task,
        id=str(row.id),
        status=TaskResultStatus[_STATES.get(row.status, "READY")],
        enqueued_at=in_django(row.create_time),
        started_at=in_django(first),
        last_attempted_at=in_django(began),
        finished_at=in_django(row.update_time) if row.is_finished else None,
        args=call.args,
        kwargs=call.kwargs,
        backend=task.backend,
        errors=[_error(attempt.error or "") for attempt in attempts],
        # Django counts the attempts by this list.
        worker_ids=[
            workers.get(number, "") for number in range(1, min(row.attempts, MOST_ATTEMPTS) + 1)
        ],
    )
    if row.status is Status.CANCELLED:
        reason = row.error or "cancelled by a caller"
        path = "delaytasks.TaskCancelledError"
        result.errors.append(TaskError(exception_class_path=path, traceback=reason))
    # A frozen dataclass: the backends of Django itself set this attribute in the same way.
    object.__setattr__(result, "_return_value", row.result)
    return result


def _error(text: str) -> TaskError:
    """Return the error of an attempt from its traceback, or from the reason of its failure."""
    path = "delaytasks.TaskFailedError"
    if text.startswith("Traceback ") and (name := _CLASS_PATH.match(last_line(text))):
        path = name[0] if "." in name[0] else f"builtins.{name[0]}"
    return TaskError(exception_class_path=path, traceback=text)
