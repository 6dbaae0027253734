"""The routes: the functions that schedule, read and change tasks, and the table of them.

The application and the OpenAPI document are made from the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from delaytasks.core.celery_calls import CALLBACK, CELERY_PREFIX
from delaytasks.core.errors import InvalidDelayError, InvalidTagError, SessionUnusableError
from delaytasks.core.inputs import parse_duration
from delaytasks.core.task import (
    CancelResult,
    DelayTask,
    NewTask,
    OnConflict,
    TouchResult,
    task_json,
)
from delaytasks.http_api import schemas
from delaytasks.http_api.api_keys import OWN_PREFIX
from delaytasks.http_api.requests import (
    ApiRequest,
    Permission,
    RefusedRequestError,
    Reply,
    Route,
    instant_of,
    tags_of_visible_task,
)
from delaytasks.http_api.schemas import InvalidRequestError
from delaytasks.runtime import runtime_of

#: The keys of tasks that were scheduled with an Idempotency-Key. No request may name such a key,
#: because its task would answer requests of another caller.
IDEMPOTENCY_START = "idempotency:"

# -- schedule -------------------------------------------------------------------------------------


def schedule_task(request: ApiRequest) -> Reply:
    return _scheduled(request, *_new_task(request.body))


def schedule_callback(request: ApiRequest) -> Reply:
    options = dict(request.body)
    url, body, headers = options.pop("url"), options.pop("body", None), options.pop("headers", None)
    content = runtime_of(request.delays).callbacks.http.content(url, body, headers)
    return _scheduled(request, *_task_of({**options, "tag": CALLBACK, "body": content}))


def _new_task(item: Mapping[str, Any]) -> tuple[NewTask, OnConflict]:
    """Return the task that a request describes, and the rule for its key."""
    tag = item["tag"]
    if tag.startswith((OWN_PREFIX, CELERY_PREFIX)):
        raise InvalidTagError(f"tasks of the tag {tag!r} are not scheduled by this route")
    return _task_of(dict(item))


def _task_of(options: dict[str, Any]) -> tuple[NewTask, OnConflict]:
    on_conflict: OnConflict = options.pop("on_conflict", "reject")
    if (options.get("key") or "").startswith(IDEMPOTENCY_START):
        raise InvalidRequestError(f"keys that start with {IDEMPOTENCY_START!r} are reserved")
    at = options.pop("at", None)
    new = NewTask(at=None if at is None else instant_of(at), **{"body": None, **options})
    return new, on_conflict


class _ScheduledBeforeError(Exception):
    """Rolls the transaction of a repeated request back."""

    def __init__(self, task: DelayTask) -> None:
        super().__init__(task.id)
        self.task = task


def _schedule_once(request: ApiRequest, new: NewTask) -> DelayTask:
    """Schedule a task, unless a request with the same Idempotency-Key has scheduled it.

    The task's key is a hash of the names of the API key and of the Idempotency-Key. Of several
    simultaneous requests, one inserts its row and the others return that row.
    """
    caller = json.dumps([request.key.name, request.idempotency_key])
    digest = hashlib.sha256(caller.encode(errors="surrogatepass")).hexdigest()
    new = new._replace(key=IDEMPOTENCY_START + digest[:32])
    wiring = runtime_of(request.delays)

    def insert(on: Any) -> DelayTask:
        task = wiring.producer.schedule(new, "keep", wiring.transactions.of(on))
        # A row keeps its key when it ends, but no unique key prevents this insert then. The look
        # comes after the insert, because from then on the key of this row prevents others.
        found = request.delays.find(tag=new.tag, key=new.key, limit=2, session=on)
        before = next((each for each in found if each.id != task.id), None)
        if before is not None:
            raise _ScheduledBeforeError(before)
        return task

    try:
        task = wiring.store.database.transaction(insert)
    except _ScheduledBeforeError as before:
        task = before.task
    except SessionUnusableError:
        # MariaDB ends a transaction that waits for the lock of a simultaneous request too long.
        found = request.delays.find(tag=new.tag, key=new.key, limit=1)
        if not found.tasks:
            raise
        task = found.tasks[0]
    if task.body != new.body:
        raise RefusedRequestError(
            422, "Another request was made with this Idempotency-Key: use a new one."
        )
    return task


def _scheduled(request: ApiRequest, new: NewTask, on_conflict: OnConflict) -> Reply:
    if request.idempotency_key is None:
        wiring = runtime_of(request.delays)
        return task_json(wiring.producer.schedule(new, on_conflict, wiring.transactions.of(None)))
    if new.key is not None:
        raise InvalidRequestError(
            "a request has a key or the header Idempotency-Key: with a key, on_conflict: keep "
            "returns the task of an earlier request"
        )
    return task_json(_schedule_once(request, new))


# -- read and change ------------------------------------------------------------------------------

_TIMES = ("since", "until", "created_since", "created_until", "updated_until")


def find_tasks(request: ApiRequest) -> Reply:
    filters = dict(request.query)
    for name in _TIMES:
        if name in filters:
            filters[name] = instant_of(filters[name])
    if "meta" in filters:
        filters["meta"] = dict(pair.split("=", 1) for pair in filters["meta"])
    page = request.delays.find(**filters)
    return {"tasks": [task_json(task) for task in page], "cursor": page.cursor}


def get_task(request: ApiRequest) -> Reply:
    return task_json(request.delays.get(request.path["id"]))


def get_attempts(request: ApiRequest) -> Reply:
    attempts = request.delays.attempts(request.path["id"])
    return {"attempts": [attempt.as_json() for attempt in attempts]}


def cancel_task(request: ApiRequest) -> Reply:
    return _cancelled(request.delays.cancel(request.path["id"], **request.body))


def cancel_key(request: ApiRequest) -> Reply:
    return _cancelled(request.delays.cancel(**request.body))


def reschedule_task(request: ApiRequest) -> Reply:
    return task_json(request.delays.reschedule(request.path["id"], **_due(request)))


def reschedule_key(request: ApiRequest) -> Reply:
    return task_json(request.delays.reschedule(**_due(request)))


def touch_task(request: ApiRequest) -> Reply:
    return _touched(request.delays.touch(request.path["id"], **request.body))


def touch_keys(request: ApiRequest) -> Reply:
    return _touched(request.delays.touch_many(**request.body))


def rerun_task(request: ApiRequest) -> Reply:
    return task_json(request.delays.rerun(request.path["id"], **request.body))


def get_statistics(request: ApiRequest) -> Reply:
    """Return counts of ended tasks by tag."""
    totals = request.delays.statistics.totals(
        since=_since(request.query.get("since", "1h")), tags=request.query.get("tag")
    )
    return {"tags": {tag: total.as_json() for tag, total in totals.items()}}


def _due(request: ApiRequest) -> dict[str, Any]:
    body = dict(request.body)
    return {**body, "at": instant_of(body["at"])} if "at" in body else body


def _since(text: str) -> Any:
    try:
        parse_duration(text)
        return text
    except InvalidDelayError:
        return instant_of(text)


def _cancelled(result: CancelResult) -> Reply:
    return {
        "is_cancelled": result.is_cancelled,
        "is_requested": result.is_requested,
        "reason": result.reason,
        "id": None if result.id is None else str(result.id),
        "status": None if result.status is None else result.status.name,
    }


def _touched(result: TouchResult[Any]) -> Reply:
    return {"touched": [*map(str, result.touched)], "gone": [*map(str, result.gone)]}


# -- the table ------------------------------------------------------------------------------------


def _tag_of_body(request: ApiRequest) -> list[str]:
    return [request.body["tag"]]


ROUTES = (
    Route(
        name="scheduleTask", method="POST", path="/v1/tasks",
        summary="Schedule a task",
        permission=Permission.SCHEDULE, function=schedule_task,
        reply="Task", request=schemas.NEW_TASK, tags_of=_tag_of_body, takes_idempotency_key=True,
    ),
    Route(
        name="scheduleCallback", method="POST", path="/v1/callbacks",
        summary="Schedule a POST to a URL",
        permission=Permission.SCHEDULE, function=schedule_callback,
        reply="Task", request=schemas.NEW_CALLBACK, tags_of=lambda request: [CALLBACK],
        takes_idempotency_key=True,
    ),
    Route(
        name="findTasks", method="GET", path="/v1/tasks",
        summary="Find tasks, in the order of their due times",
        permission=Permission.READ, function=find_tasks,
        reply="TaskPage", query=schemas.FIND_PARAMETERS,
    ),
    Route(
        name="getTask", method="GET", path="/v1/tasks/{id}",
        summary="Read a task",
        permission=Permission.READ_TASK, function=get_task,
        reply="Task", tags_of=tags_of_visible_task,
    ),
    Route(
        name="getAttempts", method="GET", path="/v1/tasks/{id}/attempts",
        summary="Read the failed attempts of a task",
        permission=Permission.READ_TASK, function=get_attempts,
        reply="Attempts", tags_of=tags_of_visible_task,
    ),
    Route(
        name="cancelTask", method="POST", path="/v1/tasks/{id}/cancel",
        summary="Cancel a task",
        permission=Permission.CHANGE_TASK, function=cancel_task,
        reply="CancelResult", request=schemas.CANCEL_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="rescheduleTask", method="POST", path="/v1/tasks/{id}/reschedule",
        summary="Give a waiting task a due time",
        permission=Permission.CHANGE_TASK, function=reschedule_task,
        reply="Task", request=schemas.RESCHEDULE_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="touchTask", method="POST", path="/v1/tasks/{id}/touch",
        summary="Postpone a timeout",
        permission=Permission.CHANGE_TASK, function=touch_task,
        reply="TouchResult", request=schemas.TOUCH_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="rerunTask", method="POST", path="/v1/tasks/{id}/rerun",
        summary="Run a failed or cancelled task again",
        permission=Permission.CHANGE_TASK, function=rerun_task,
        reply="Task", request=schemas.RERUN_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="cancelKey", method="POST", path="/v1/keys/cancel",
        summary="Cancel the live task of a key",
        permission=Permission.CHANGE_TASK, function=cancel_key,
        reply="CancelResult", request=schemas.CANCEL_KEY, tags_of=_tag_of_body,
    ),
    Route(
        name="rescheduleKey", method="POST", path="/v1/keys/reschedule",
        summary="Give the live task of a key a due time",
        permission=Permission.CHANGE_TASK, function=reschedule_key,
        reply="Task", request=schemas.RESCHEDULE_KEY, tags_of=_tag_of_body,
    ),
    Route(
        name="touchKeys", method="POST", path="/v1/keys/touch",
        summary="Postpone the timeouts of many keys",
        permission=Permission.CHANGE_TASK, function=touch_keys,
        reply="TouchResult", request=schemas.TOUCH_KEYS, tags_of=_tag_of_body,
    ),
    Route(
        name="getStatistics", method="GET", path="/v1/statistics",
        summary="Read counts of ended tasks",
        permission=Permission.READ, function=get_statistics,
        reply="Statistics", query=schemas.STATISTICS_PARAMETERS,
    ),
)  # fmt: skip
