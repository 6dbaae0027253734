"""Celery tasks of a project that existed before delaytasks, for tests of durable delays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from celery import shared_task


def _facts(request: Any) -> dict[str, Any]:
    """Return what a task sees of its message, without what differs in each call."""
    names = (
        "args", "kwargs", "retries", "parent_id", "group", "group_index", "timelimit", "time_limit",
        "soft_time_limit", "headers", "shadow", "ignore_result", "stamps", "stamped_headers",
        "callbacks", "errbacks", "chain", "chord", "replaced_task_nesting", "delivery_info",
        "is_eager", "called_directly", "utc", "expires", "reply_to", "origin",
    )  # fmt: skip
    # Celery 5.5 lacks some of the names.
    facts: dict[str, Any] = {name: getattr(request, name, None) for name in names}
    facts["delivery_info"]["redelivered"] = bool(facts["delivery_info"]["redelivered"])
    facts["root_id"] = None if request.root_id == request.id else request.root_id
    facts["is_correlated"] = request.correlation_id == request.id
    properties = request.properties or {}
    facts["properties"] = {
        name: properties.get(name)
        for name in (
            "content_type", "content_encoding", "delivery_mode", "priority", "message_id",
            "expiration",
        )
    }  # fmt: skip
    return facts


@shared_task(bind=True, name="durable.see")
def see(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return _facts(self.request)


@shared_task(bind=True, name="durable.see_in_file")
def see_in_file(self: Any, path: str) -> None:
    """Write what the task sees to a file, which exists when it is complete."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(_facts(self.request)))
    part.rename(path)


@shared_task(name="durable.add")
def add(first: int, second: int) -> int:
    return first + second


@shared_task(name="durable.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@shared_task(name="durable.fail")
def fail() -> None:
    raise ValueError("as asked")


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


@shared_task(name="durable.note")
def note(path: str, word: str) -> None:
    with open(path, "a") as file:
        file.write(word + "\n")
