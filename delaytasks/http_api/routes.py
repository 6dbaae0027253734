"""The table of routes. The application and the OpenAPI document are made from it."""

from __future__ import annotations

from delaytasks.core.callbacks import CALLBACK
from delaytasks.http_api import new_tasks, recurring_schedules, schemas, tasks
from delaytasks.http_api.requests import ApiRequest, Permission, Route, tags_of_visible_task


def _tag_of_body(request: ApiRequest) -> list[str]:
    return [request.body["tag"]]


ROUTES = (
    Route(
        name="scheduleTask", method="POST", path="/v1/tasks",
        summary="Schedule a task",
        permission=Permission.SCHEDULE, function=new_tasks.schedule_task,
        reply="Task", request=schemas.NEW_TASK, tags_of=_tag_of_body, takes_idempotency_key=True,
    ),
    Route(
        name="scheduleTasks", method="POST", path="/v1/tasks/batch",
        summary="Schedule many tasks",
        permission=Permission.SCHEDULE, function=new_tasks.schedule_tasks,
        reply="ScheduledTasks", request=schemas.NEW_TASKS, tags_of=new_tasks.tags_of_tasks,
        takes_idempotency_key=True,
    ),
    Route(
        name="scheduleCallback", method="POST", path="/v1/callbacks",
        summary="Schedule a POST to a URL",
        permission=Permission.SCHEDULE, function=new_tasks.schedule_callback,
        reply="Task", request=schemas.NEW_CALLBACK, tags_of=lambda request: [CALLBACK],
        takes_idempotency_key=True,
    ),
    Route(
        name="findTasks", method="GET", path="/v1/tasks",
        summary="Find tasks, in the order of their due times",
        permission=Permission.READ, function=tasks.find_tasks,
        reply="TaskPage", query=schemas.FIND_PARAMETERS,
    ),
    Route(
        name="getTask", method="GET", path="/v1/tasks/{id}",
        summary="Read a task",
        permission=Permission.READ_TASK, function=tasks.get_task,
        reply="Task", tags_of=tags_of_visible_task,
    ),
    Route(
        name="getAttempts", method="GET", path="/v1/tasks/{id}/attempts",
        summary="Read the failed attempts of a task",
        permission=Permission.READ_TASK, function=tasks.get_attempts,
        reply="Attempts", tags_of=tags_of_visible_task,
    ),
    Route(
        name="cancelTask", method="POST", path="/v1/tasks/{id}/cancel",
        summary="Cancel a task",
        permission=Permission.CHANGE_TASK, function=tasks.cancel_task,
        reply="CancelResult", request=schemas.CANCEL_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="rescheduleTask", method="POST", path="/v1/tasks/{id}/reschedule",
        summary="Give a waiting task a due time",
        permission=Permission.CHANGE_TASK, function=tasks.reschedule_task,
        reply="Task", request=schemas.RESCHEDULE_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="touchTask", method="POST", path="/v1/tasks/{id}/touch",
        summary="Postpone a timeout",
        permission=Permission.CHANGE_TASK, function=tasks.touch_task,
        reply="TouchResult", request=schemas.TOUCH_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="rerunTask", method="POST", path="/v1/tasks/{id}/rerun",
        summary="Run a failed or cancelled task again",
        permission=Permission.CHANGE_TASK, function=tasks.rerun_task,
        reply="Task", request=schemas.RERUN_TASK, tags_of=tags_of_visible_task,
    ),
    Route(
        name="cancelKey", method="POST", path="/v1/keys/cancel",
        summary="Cancel the live task of a key",
        permission=Permission.CHANGE_TASK, function=tasks.cancel_key,
        reply="CancelResult", request=schemas.CANCEL_KEY, tags_of=_tag_of_body,
    ),
    Route(
        name="rescheduleKey", method="POST", path="/v1/keys/reschedule",
        summary="Give the live task of a key a due time",
        permission=Permission.CHANGE_TASK, function=tasks.reschedule_key,
        reply="Task", request=schemas.RESCHEDULE_KEY, tags_of=_tag_of_body,
    ),
    Route(
        name="touchKeys", method="POST", path="/v1/keys/touch",
        summary="Postpone the timeouts of many keys",
        permission=Permission.CHANGE_TASK, function=tasks.touch_keys,
        reply="TouchResult", request=schemas.TOUCH_KEYS, tags_of=_tag_of_body,
    ),
    Route(
        name="getStatistics", method="GET", path="/v1/statistics",
        summary="Read counts of ended and waiting tasks",
        permission=Permission.READ, function=tasks.get_statistics,
        reply="Statistics", query=schemas.STATISTICS_PARAMETERS,
    ),
    Route(
        name="listSchedules", method="GET", path="/v1/recurring",
        summary="List recurring schedules by name",
        permission=Permission.READ, function=recurring_schedules.list_schedules,
        reply="RecurringSchedules", query=schemas.LIST_PARAMETERS,
    ),
    Route(
        name="getSchedule", method="GET", path="/v1/recurring/{name}",
        summary="Read a recurring schedule",
        permission=Permission.READ, function=recurring_schedules.get_schedule,
        reply="RecurringSchedule",
    ),
    Route(
        name="setSchedule", method="PUT", path="/v1/recurring/{name}",
        summary="Store a recurring schedule",
        permission=Permission.OPERATE, function=recurring_schedules.set_schedule,
        reply="RecurringSchedule", request=schemas.NEW_SCHEDULE,
    ),
    Route(
        name="removeSchedule", method="DELETE", path="/v1/recurring/{name}",
        summary="Delete a recurring schedule",
        permission=Permission.OPERATE, function=recurring_schedules.remove_schedule,
        reply="RecurringSchedule",
    ),
    Route(
        name="pauseSchedule", method="POST", path="/v1/recurring/{name}/pause",
        summary="Pause a recurring schedule",
        permission=Permission.OPERATE, function=recurring_schedules.pause_schedule,
        reply="RecurringSchedule",
    ),
    Route(
        name="resumeSchedule", method="POST", path="/v1/recurring/{name}/resume",
        summary="End a pause",
        permission=Permission.OPERATE, function=recurring_schedules.resume_schedule,
        reply="RecurringSchedule",
    ),
    Route(
        name="runSchedule", method="POST", path="/v1/recurring/{name}/run",
        summary="Make one task that is due now",
        permission=Permission.OPERATE, function=recurring_schedules.run_schedule,
        reply="Task",
    ),
)  # fmt: skip
