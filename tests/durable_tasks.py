"""Celery tasks of a project that existed before delaytasks, for tests of durable delays."""

from __future__ import annotations

from typing import Any

from celery import shared_task


@shared_task(name="durable.add")
def add(first: int, second: int) -> int:
    return first + second


@shared_task(name="durable.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@shared_task(bind=True, name="durable.persist", max_retries=5)
def persist(self: Any, times: int, **how: Any) -> tuple[int, str]:
    """Retry `times` times, and return the number of retries and the id."""
    if self.request.retries < times:
        raise self.retry(**how)
    return self.request.retries, self.request.id


@shared_task(
    bind=True,
    name="durable.autoretry",
    autoretry_for=(ValueError,),
    retry_backoff=0.1,
    retry_jitter=False,
    max_retries=3,
)
def autoretry(self: Any) -> int:
    if self.request.retries < 2:
        raise ValueError("not yet")
    retries: int = self.request.retries
    return retries
