"""Annotate with the values and handle the errors of the API, and call what belongs to one part.

The type checkers find nothing but the errors that are marked. No test runs this module.
"""

from __future__ import annotations

from datetime import datetime

from celery import Celery
from typing_extensions import assert_type

import delaytasks as dt
from delaytasks import DelayedTask, DelayTasks

delays = DelayTasks(Celery("shop"), "sqlite://")
shards = dt.Shards([delays])
assert_type(dt.current_delays(), DelayTasks)


outcomes: dict[str, dt.Outcome] = {"sent": dt.Done(), "busy": dt.Snooze("1h")}
outcomes |= {"away": dt.Retry("5m"), "gone": dt.Fail("gone"), "late": dt.Cancel("not needed")}


@delays.recurring("0 9 * * mon-fri", tz="Europe/Berlin")
@delays.processor("report.send", retries=dt.RetrySchedule.LEVELS)
def send_report(body: dict[str, str], task: DelayedTask) -> dt.Outcome:
    return outcomes[body["status"]]


handle: dt.Processor[dict[str, str], ..., dt.Outcome] = send_report
assert_type(dt.RetrySchedule.NOTIFY.retry_delays_s, tuple[float, ...])
assert_type(dt.RetrySchedule.LEVELS.wait_s(1), float | None)
assert_type(dt.RetrySchedule.LEVELS.has_retry_delay(1), bool)
assert_type(dt.RetrySchedule("1s").variation, float)


def reason_of(error: dt.DelayTaskError) -> str | int | None:
    if isinstance(error, dt.InvalidInputError):
        assert_type(error.argument, str)
        kinds = (dt.BodyRefusedError, dt.ForbiddenURLError, dt.UnknownTagError)
        return error.argument if isinstance(error, kinds) else None
    if isinstance(error, dt.OutcomeUnknownError):
        return assert_type(error.id, int | None)
    of_database = (dt.StoreUnavailableError, dt.SessionUnusableError, dt.StoreError)
    of_task = (dt.TaskNotFoundError, dt.DuplicateTaskError, dt.StaleVersionError)
    of_state = (dt.LeaseLostError, dt.TaskCancelledError, dt.TaskStateError)
    others = (dt.ConfigError, dt.BodyEncryptedError, dt.TaskFailedError, dt.WaitTimeoutError)
    return str(error) if isinstance(error, (*of_database, *of_task, *of_state, *others)) else None


def operate(now: datetime) -> None:
    task = delays.get(7, attempts=True)
    attempts: tuple[dt.Attempt, ...] = task.attempts
    assert_type([attempt.error for attempt in attempts], list[str | None])
    findings: list[dt.Finding] = delays.check()
    assert_type([finding.first_due for finding in findings], list[datetime])
    forecast: dt.Forecast = delays.forecast(7, processes=4)
    assert_type([hour.due for hour in forecast.hours], list[int])
    policy: dt.Policy | None = delays.policies.pause(tag="report.send", until=now)
    assert_type(delays.policies.set(tag="report.send", concurrency=2), dt.Policy)
    assert_type(delays.policies.resume(tag="report.send"), dt.Policy)
    policies: list[dt.Policy] = delays.policies.list(queue="reports")
    delays.policies.remove(tag="report.send")
    assert policy in policies
    schedule: dt.RecurringSchedule = delays.recurring.set("daily", "report.send", cron="0 9 * * *")
    assert_type(delays.recurring.get("daily"), dt.RecurringSchedule)
    assert_type(delays.recurring.list(), list[dt.RecurringSchedule])
    assert_type(delays.recurring.pause(schedule.name), dt.RecurringSchedule)
    assert_type(delays.recurring.resume("daily"), dt.RecurringSchedule)
    assert_type(delays.recurring.schedule_now("daily"), DelayedTask)
    delays.recurring.remove("daily")
    assert_type(delays.statistics.totals(since="1d")["report.send"].failed, int)
    assert_type(delays.settings.namespace, str)
    delays.events.subscribe(lambda name, fields: print(name, fields))
    receipt: str = delays.result(task, "30s")
    assert receipt
    delays.apply_async(send_report, countdown=60)
    with delays.transaction(object()):
        delays.schedule_many([dt.NewTask("report.send", {}, 5)])
    assert_type(shards.member("report.send", "7"), DelayTasks)
    assert_type(shards.member_of(task), DelayTasks)
    assert_type(shards.each(DelayTasks.new_id), dict[int, int])
    assert_type(shards.any(DelayTasks.new_id), int)
    delays.close()
