"""The routes that schedule tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delaytasks.core.callbacks import CALLBACK
from delaytasks.core.celery_tags import CELERY_PREFIX
from delaytasks.core.errors import InvalidTagError
from delaytasks.core.interfaces import OnConflict
from delaytasks.core.new_task import NewTask
from delaytasks.core.task_json import task_json
from delaytasks.http_api.api_keys import OWN_PREFIX
from delaytasks.http_api.idempotency import IdempotencyMark, schedule
from delaytasks.http_api.requests import ApiRequest, Reply, instant_of
from delaytasks.http_api.validation import InvalidRequestError
from delaytasks.wiring import wiring_of


def schedule_task(request: ApiRequest) -> Reply:
    return _scheduled(request, *new_task(request.body))


def schedule_tasks(request: ApiRequest) -> Reply:
    """Schedule all tasks in one transaction; with an Idempotency-Key, each of them once."""
    items = request.body["tasks"]
    asked = [new_task(item) for item in items]
    rules = {on_conflict for _, on_conflict in asked}
    if len(rules) > 1:
        raise InvalidRequestError("the tasks of one request have the same on_conflict")
    if request.idempotency_key is None:
        tasks = [new for new, _ in asked]
        count = request.delays.schedule_many(tasks, on_conflict=rules.pop())
        return {"scheduled": count}
    for index, (new, on_conflict) in enumerate(asked):
        schedule(request.delays, new, on_conflict, IdempotencyMark.of(request, items[index], index))
    return {"scheduled": len(asked)}


def schedule_callback(request: ApiRequest) -> Reply:
    options = dict(request.body)
    url, body, headers = options.pop("url"), options.pop("body", None), options.pop("headers", None)
    content = wiring_of(request.delays).callbacks.http.content(url, body, headers)
    return _scheduled(request, *_task_of({**options, "tag": CALLBACK, "body": content}))


def tags_of_tasks(request: ApiRequest) -> list[str]:
    return [item["tag"] for item in request.body["tasks"]]


def new_task(item: Mapping[str, Any]) -> tuple[NewTask, OnConflict]:
    """Return the task that a request describes, and the rule for its key."""
    return _task_of({**item, "tag": callers_tag(item["tag"])})


def callers_tag(tag: str) -> str:
    """Return the tag, or refuse one whose tasks send requests and messages."""
    if tag.startswith((OWN_PREFIX, CELERY_PREFIX)):
        raise InvalidTagError(f"tasks of the tag {tag!r} are not scheduled by this route")
    return tag


def _task_of(options: dict[str, Any]) -> tuple[NewTask, OnConflict]:
    on_conflict: OnConflict = options.pop("on_conflict", "reject")
    at = options.pop("at", None)
    new = NewTask(at=None if at is None else instant_of(at), **{"body": None, **options})
    return new, on_conflict


def _scheduled(request: ApiRequest, new: NewTask, on_conflict: OnConflict) -> Reply:
    task = schedule(request.delays, new, on_conflict, IdempotencyMark.of(request, request.body))
    return task_json(task)
