"""The backend of Django's Tasks framework: a task is a processor whose tag is its path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.dispatch import Signal
from django.utils import timezone
from django.utils.module_loading import import_string

from delaytasks.contrib.django.instance import project_delays
from delaytasks.model.errors import InvalidInputError, LeaseLostError, TaskNotFoundError
from delaytasks.model.moves import Done, Status
from delaytasks.model.task import Attempt, DelayedTask
from delaytasks.model.text import traceback_text
from delaytasks.operate.texts import last_line
from delaytasks.registry import ProcessorSpec
from delaytasks.run.calls import ends_process
from delaytasks.runtime import runtime_of
from delaytasks.worker.processes import processes_of

# -- task framework -------------------------------------------------------------------------------

# The classes of Django's Tasks framework: `django.tasks`, or `django-tasks` before Django 6.


try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ModuleNotFoundError:
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

    try:
        from django_tasks.exceptions import InvalidTask
    except ImportError:  # up to 0.12
        from django_tasks.exceptions import InvalidTaskError as InvalidTask

# -- The body of the row of a Django task: its arguments, and the options of the call -------------


@dataclass(frozen=True, slots=True)
class TaskCall:
    """The body of a row. Another program may have written it."""

    args: list[Any]
    kwargs: dict[str, Any]
    #: The alias in settings.TASKS.
    backend: str
    #: From -100 to 100. The column `priority` has ten levels.
    priority: int = 0
    run_after: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("args", list), ("kwargs", dict), ("backend", str), ("priority", int)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} is a {kind.__name__}")
        if self.run_after is not None:
            datetime.fromisoformat(self.run_after)

    def task(self, row: DelayedTask) -> Task:
        """Return the task as the caller has enqueued it. The tag of its row is its path."""
        run_after = self.run_after and in_django(datetime.fromisoformat(self.run_after))
        return declared_task(row.tag).using(
            priority=self.priority,
            queue_name=row.queue,
            run_after=run_after or None,
            backend=self.backend,
        )


def declared_task(path: str) -> Task:
    """Return the task that workers import by its path."""
    try:
        found = import_string(path)
    except ImportError:
        found = None
    if not isinstance(found, Task):
        raise InvalidTask(
            f"Workers find a task by the name of its function, and {path} is not a task: "
            "decorate the function where it is defined."
        )
    return found


def column_priority(priority: int) -> int:
    """Return the level from 0 to 9 for a priority from -100 to 100."""
    if priority < 0:
        return (priority + 100) // 25
    return 4 + -(-priority // 20)


def in_django(instant: datetime | None) -> datetime | None:
    """Return an instant as Django's own functions do, which is naive without USE_TZ."""
    if instant is None or settings.USE_TZ:
        return instant
    naive: datetime = timezone.make_naive(instant)
    return naive


# -- Makes the `TaskResult` of a row --------------------------------------------------------------


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
    task: Task, call: TaskCall, row: DelayedTask, attempts: Sequence[Attempt] = ()
) -> TaskResult:
    """Return the result of a task; `attempts` are the failed attempts of its row."""
    began = row.execution_time if row.runs else None
    first = next((attempt.began for attempt in attempts if attempt.began), began)
    workers = {attempt.number: attempt.worker or "" for attempt in attempts}
    if row.worker and row.runs:
        workers[row.runs] = row.worker
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
            workers.get(number, "") for number in range(1, min(row.runs, MOST_ATTEMPTS) + 1)
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


# -- The processors of Django tasks: call the function, and send the signals about the run --------


def run_task(call: TaskCall, row: DelayedTask) -> Done:
    """Call the function of a Django task."""
    run = DjangoTaskRun(call, row)
    try:
        value = normalize_json(run.task.func(*run.args, **call.kwargs))
    except BaseException as error:
        run.failed(error)
        raise
    return run.succeeded(value)


async def arun_task(call: TaskCall, row: DelayedTask) -> Done:
    """Call the coroutine function of a Django task.

    Receivers of the signals are called in the thread in which Django's ORM has its connection.
    """
    run = await sync_to_async(DjangoTaskRun)(call, row)
    try:
        value = normalize_json(await run.task.func(*run.args, **call.kwargs))
    except Exception as error:
        await sync_to_async(run.failed)(error)
        raise
    return await sync_to_async(run.succeeded)(value)


class DjangoTaskRun:
    """One run, from the signal `task_started` to `task_finished`."""

    def __init__(self, call: TaskCall, row: DelayedTask) -> None:
        delays = project_delays()
        self._wiring = runtime_of(delays)
        self._call = call
        self._attempts = delays.get(row, attempts=True).attempts if row.runs > 1 else ()
        worker = processes_of(self._wiring.celery).name(os.getpid())
        # A claimed row is without the columns that its claim has just written.
        self._row = replace(row, worker=worker, execution_time=self._wiring.clock.now())
        self.task = call.task(row)
        started = result_of_row(self.task, call, self._row, self._attempts)
        self.args = [TaskContext(task_result=started)] if self.task.takes_context else []
        self.args += call.args
        self._send(task_started, started)

    def succeeded(self, value: object) -> Done:
        """Send `task_finished`, and return the outcome."""
        result = self._finished(Status.DONE, self._attempts)
        object.__setattr__(result, "_return_value", value)
        self._send(task_finished, result)
        return Done(value)

    def failed(self, error: BaseException) -> None:
        """Send `task_finished`, unless the task will run again."""
        row, settings = self._row, self._wiring.settings
        processor = self._wiring.registry.get(row.tag)
        retries = processor and processor.retry_schedule_for(type(error), row)
        has_retry = bool(retries and retries.has_retry_delay(row.runs))
        if has_retry or ends_process(error) or isinstance(error, LeaseLostError):
            return
        text, now = traceback_text(error, settings.max_error_bytes), self._wiring.clock.now()
        last = Attempt(row.runs, row.execution_time, now, row.worker, text)
        self._send(task_finished, self._finished(Status.FAILED, [*self._attempts, last]))

    def _finished(self, status: Status, attempts: Sequence[Attempt]) -> TaskResult:
        row = replace(self._row, status=status, update_time=self._wiring.clock.now())
        return result_of_row(self.task, self._call, row, attempts)

    def _send(self, signal: Signal, result: TaskResult) -> None:
        # A receiver that fails is logged by Django, and does not change the outcome.
        signal.send_robust(type(self.task.get_backend()), task_result=result)


class DelayTasksBackend(BaseTaskBackend):
    """Writes each enqueued task as a row, in the transaction of the caller.

    `OPTIONS` are options of `@processor`, such as `retries`, for the tasks that are declared with
    this backend.

    Examples
    --------
    >>> BACKEND = "delaytasks.contrib.django.tasks_backend.DelayTasksBackend"
    >>> TASKS = {"default": {"BACKEND": BACKEND}}
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Task) -> None:
        """Check a task, and register its processor. Django calls this when a task is declared."""
        super().validate_task(task)
        if _processor_of(task.module_path) is None:
            options: Any = {"queue": task.queue_name, "keep_result": True, "schema": TaskCall}
            function: Any = arun_task if iscoroutinefunction(task.func) else run_task
            project_delays().processor(task.module_path, **options, **self.options)(function)

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        self.validate_task(task)
        if not isinstance(declared_task(task.module_path).get_backend(), DelayTasksBackend):
            raise InvalidTask(
                f"{task.module_path} is declared with another backend, so that workers have no "
                f"processor for it: declare it with @task(backend={self.alias!r})."
            )
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        call = TaskCall(
            normalize_json(args),
            normalize_json(kwargs),
            self.alias,
            task.priority,
            run_after and run_after.isoformat(),
        )
        delays = project_delays()
        row = delays.schedule_delay(
            task.module_path,
            call,
            0 if run_after is None else None,
            at=run_after,
            queue=task.queue_name,
            priority=column_priority(task.priority),
        )
        result = result_of_row(task, call, row)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        delays = project_delays()
        try:
            row = delays.get(result_id)
        except (InvalidInputError, TaskNotFoundError):
            raise TaskResultDoesNotExist(result_id) from None
        processor = _processor_of(row.tag)
        if processor is None:
            raise TaskResultDoesNotExist(
                f"{result_id}: this process has no Django task {row.tag!r}; import its module"
            )
        call = processor.checked(row.body)
        failed = row.runs - (row.status in (Status.RUNNING, Status.DONE))
        attempts = delays.get(row, attempts=True).attempts if failed else ()
        return result_of_row(call.task(row), call, row, attempts)

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        yield from super().check(**kwargs)
        if not apps.is_installed("delaytasks.contrib.django"):
            yield checks.Error(
                f"The backend of TASKS[{self.alias!r}] needs the tables of delaytasks.",
                "Add 'delaytasks.contrib.django' to INSTALLED_APPS.",
                id="delaytasks.E010",
            )


def _processor_of(tag: str) -> ProcessorSpec | None:
    """Return the processor of a tag, if it is that of a Django task."""
    found = runtime_of(project_delays()).registry.get(tag)
    return found if found and found.function in (run_task, arun_task) else None
