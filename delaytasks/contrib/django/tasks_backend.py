"""The backend of Django's Tasks framework: its tasks are rows. See docs/django-tasks.md."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import iscoroutinefunction
from typing import Any

from django.apps import apps
from django.core import checks
from django.utils import timezone

from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.task_calls import TaskCall, column_priority, declared_task
from delaytasks.contrib.django.task_framework import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    normalize_json,
    task_enqueued,
)
from delaytasks.contrib.django.task_processor import arun_task, run_task
from delaytasks.contrib.django.task_results import result_of_row
from delaytasks.core.errors import InvalidIdError, TaskNotFoundError
from delaytasks.core.states import Status
from delaytasks.processors.registry import ProcessorSpec
from delaytasks.runtime import runtime_of


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
        options: Any = {"queue": task.queue_name, "priority": column_priority(task.priority)}
        if run_after is None:
            row = delays.schedule_delay(task.module_path, call, 0, **options)
        else:
            row = delays.schedule_at(task.module_path, call, run_after, **options)
        result = result_of_row(task, call, row)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        delays = project_delays()
        try:
            row = delays.get(result_id)
        except (InvalidIdError, TaskNotFoundError):
            raise TaskResultDoesNotExist(result_id) from None
        processor = _processor_of(row.tag)
        if processor is None:
            raise TaskResultDoesNotExist(
                f"{result_id}: this process has no Django task {row.tag!r}; import its module"
            )
        call = processor.checked(processor.body_of(row))
        failed = row.attempts - (row.status in (Status.RUNNING, Status.DONE))
        attempts = delays.attempts(row) if failed else []
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
