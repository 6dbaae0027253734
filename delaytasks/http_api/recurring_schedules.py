"""The routes of recurring schedules."""

from __future__ import annotations

from typing import Any

from delaytasks.core.task_json import task_json
from delaytasks.http_api.new_tasks import callers_tag
from delaytasks.http_api.requests import ApiRequest, Reply, instant_of


def list_schedules(request: ApiRequest) -> Reply:
    found = request.delays.recurring.list(**request.query)
    return {"schedules": [_shown(schedule) for schedule in found]}


def get_schedule(request: ApiRequest) -> Reply:
    return _shown(request.delays.recurring.get(request.path["name"]))


def set_schedule(request: ApiRequest) -> Reply:
    options = dict(request.body)
    tag = callers_tag(options.pop("tag"))
    if "start" in options:
        options["start"] = instant_of(options["start"])
    name, actor = request.path["name"], request.key.name
    return _shown(request.delays.recurring.set(name, tag, actor=actor, **options))


def remove_schedule(request: ApiRequest) -> Reply:
    return _changed(request, request.delays.recurring.remove)


def pause_schedule(request: ApiRequest) -> Reply:
    return _changed(request, request.delays.recurring.pause)


def resume_schedule(request: ApiRequest) -> Reply:
    return _changed(request, request.delays.recurring.resume)


def run_schedule(request: ApiRequest) -> Reply:
    return task_json(request.delays.recurring.run(request.path["name"]))


def _changed(request: ApiRequest, change: Any) -> Reply:
    return _shown(change(request.path["name"], actor=request.key.name))


def _shown(schedule: Any) -> dict[str, Any]:
    document: dict[str, Any] = schedule.as_json()
    for internal in ("id", "headers_json"):
        del document[internal]
    if schedule.last_task_id is not None:
        document["last_task_id"] = str(schedule.last_task_id)
    return document
