"""The routes that read and change tasks, and read statistics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from delaytasks.core.cancel_result import CancelResult
from delaytasks.core.durations import parse_duration
from delaytasks.core.errors import InvalidDelayError
from delaytasks.core.task_json import task_json
from delaytasks.core.touch_result import TouchResult
from delaytasks.http_api.requests import ApiRequest, Reply, instant_of

_TIMES = ("since", "until", "created_since", "created_until", "updated_until")


def find_tasks(request: ApiRequest) -> Reply:
    filters = dict(request.query)
    for name in _TIMES:
        if name in filters:
            filters[name] = instant_of(filters[name])
    if "meta" in filters:
        filters["meta"] = dict(pair.split("=", 1) for pair in filters["meta"])
    page = request.delays.find(**filters)
    document = {"tasks": [task_json(task) for task in page], "cursor": page.cursor}
    return {**document, "missing_shards": list(page.missing)}


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
    """Return counts of ended tasks by tag, and the last gauges that a sweep has counted."""
    statistics = request.delays.statistics
    totals = statistics.totals(
        since=_since(request.query.get("since", "1h")), tags=request.query.get("tag")
    )
    gauges = statistics.gauges(since="10m")
    return {
        "tags": {tag: total.as_json() for tag, total in totals.items()},
        "gauges": asdict(gauges[-1].gauges) if gauges else None,
    }


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
