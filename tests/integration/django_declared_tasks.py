"""Tasks of Django's Tasks framework, for `test_django_tasks.py`."""

from __future__ import annotations

from typing import Any

from delaytasks.contrib.django.tasks_backend import TaskContext

try:
    from django.tasks import task
except ModuleNotFoundError:
    from django_tasks import task

#: What `note` was called with.
noted: list[Any] = []


@task
def note(value: Any) -> None:
    noted.append(value)


@task(queue_name="sums")
def add(first: int, second: int = 0) -> int:
    return first + second


@task(backend="patient")
def fail(message: str) -> None:
    raise ValueError(message)


@task(takes_context=True)
async def atell(context: TaskContext) -> list[Any]:
    return [context.task_result.id, context.attempt]


@task(backend="other")
def of_another_backend() -> None: ...
