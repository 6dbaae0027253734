"""The table of routes. The application and the OpenAPI document are made from it."""

from __future__ import annotations

from delaytasks.core.callbacks import CALLBACK
from delaytasks.http_api import new_tasks, recurring_schedules, schemas, tasks
from delaytasks.http_api.requests import ApiRequest, Permission, Route, visible_tag

_READ, _OPERATE, _SCHEDULE = Permission.READ, Permission.OPERATE, Permission.SCHEDULE
_READ_TASK, _CHANGE_TASK = Permission.READ_TASK, Permission.CHANGE_TASK


def _tag_of_body(request: ApiRequest) -> list[str]:
    return [request.body["tag"]]


ROUTES = (
    Route(
        "scheduleTask", "POST", "/v1/tasks", "Schedule a task",
        _SCHEDULE, new_tasks.schedule_task, "Task",
        request=schemas.NEW_TASK, tags_of=_tag_of_body, takes_idempotency_key=True,
    ),
    Route(
        "scheduleTasks", "POST", "/v1/tasks/batch", "Schedule many tasks",
        _SCHEDULE, new_tasks.schedule_tasks, "ScheduledTasks",
        request=schemas.NEW_TASKS, tags_of=new_tasks.tags_of_tasks, takes_idempotency_key=True,
    ),
    Route(
        "scheduleCallback", "POST", "/v1/callbacks", "Schedule a POST to a URL",
        _SCHEDULE, new_tasks.schedule_callback, "Task",
        request=schemas.NEW_CALLBACK, tags_of=lambda request: [CALLBACK],
        takes_idempotency_key=True,
    ),
    Route(
        "findTasks", "GET", "/v1/tasks", "Find tasks, in the order of their due times",
        _READ, tasks.find_tasks, "TaskPage", query=schemas.FIND_PARAMETERS,
    ),
    Route(
        "getTask", "GET", "/v1/tasks/{id}", "Read a task",
        _READ_TASK, tasks.get_task, "Task", tags_of=visible_tag,
    ),
    Route(
        "getAttempts", "GET", "/v1/tasks/{id}/attempts", "Read the failed attempts of a task",
        _READ_TASK, tasks.get_attempts, "Attempts", tags_of=visible_tag,
    ),
    Route(
        "cancelTask", "POST", "/v1/tasks/{id}/cancel", "Cancel a task",
        _CHANGE_TASK, tasks.cancel_task, "CancelResult",
        request=schemas.CANCEL_TASK, tags_of=visible_tag,
    ),
    Route(
        "rescheduleTask", "POST", "/v1/tasks/{id}/reschedule", "Give a waiting task a due time",
        _CHANGE_TASK, tasks.reschedule_task, "Task",
        request=schemas.RESCHEDULE_TASK, tags_of=visible_tag,
    ),
    Route(
        "touchTask", "POST", "/v1/tasks/{id}/touch", "Postpone a timeout",
        _CHANGE_TASK, tasks.touch_task, "TouchResult",
        request=schemas.TOUCH_TASK, tags_of=visible_tag,
    ),
    Route(
        "retryTask", "POST", "/v1/tasks/{id}/retry", "Run a failed or cancelled task again",
        _CHANGE_TASK, tasks.retry_task, "Task",
        request=schemas.RETRY_TASK, tags_of=visible_tag,
    ),
    Route(
        "cancelKey", "POST", "/v1/keys/cancel", "Cancel the live task of a key",
        _CHANGE_TASK, tasks.cancel_key, "CancelResult",
        request=schemas.CANCEL_KEY, tags_of=_tag_of_body,
    ),
    Route(
        "rescheduleKey", "POST", "/v1/keys/reschedule", "Give the live task of a key a due time",
        _CHANGE_TASK, tasks.reschedule_key, "Task",
        request=schemas.RESCHEDULE_KEY, tags_of=_tag_of_body,
    ),
    Route(
        "touchKeys", "POST", "/v1/keys/touch", "Postpone the timeouts of many keys",
        _CHANGE_TASK, tasks.touch_keys, "TouchResult",
        request=schemas.TOUCH_KEYS, tags_of=_tag_of_body,
    ),
    Route(
        "getStatistics", "GET", "/v1/statistics", "Read counts of ended and waiting tasks",
        _READ, tasks.get_statistics, "Statistics", query=schemas.STATISTICS_PARAMETERS,
    ),
    Route(
        "listSchedules", "GET", "/v1/recurring", "List recurring schedules by name",
        _READ, recurring_schedules.list_schedules, "RecurringSchedules",
        query=schemas.LIST_PARAMETERS,
    ),
    Route(
        "getSchedule", "GET", "/v1/recurring/{name}", "Read a recurring schedule",
        _READ, recurring_schedules.get_schedule, "RecurringSchedule",
    ),
    Route(
        "setSchedule", "PUT", "/v1/recurring/{name}", "Store a recurring schedule",
        _OPERATE, recurring_schedules.set_schedule, "RecurringSchedule",
        request=schemas.NEW_SCHEDULE,
    ),
    Route(
        "removeSchedule", "DELETE", "/v1/recurring/{name}", "Delete a recurring schedule",
        _OPERATE, recurring_schedules.remove_schedule, "RecurringSchedule",
    ),
    Route(
        "pauseSchedule", "POST", "/v1/recurring/{name}/pause", "Pause a recurring schedule",
        _OPERATE, recurring_schedules.pause_schedule, "RecurringSchedule",
    ),
    Route(
        "resumeSchedule", "POST", "/v1/recurring/{name}/resume", "End a pause",
        _OPERATE, recurring_schedules.resume_schedule, "RecurringSchedule",
    ),
    Route(
        "runSchedule", "POST", "/v1/recurring/{name}/run", "Make one task that is due now",
        _OPERATE, recurring_schedules.run_schedule, "Task",
    ),
)  # fmt: skip
