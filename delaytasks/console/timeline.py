"""The life of a task as a list of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from delaytasks.core.attempt import Attempt
from delaytasks.core.durations import show_duration
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import last_line


class LifeEvent(NamedTuple):
    """One event; `kind` is a CSS class."""

    at: datetime | None
    kind: str
    title: str
    detail: str = ""
    is_future: bool = False


_ENDS = {Status.DONE: "done", Status.FAILED: "failed", Status.CANCELLED: "cancelled"}


def timeline_of(
    task: DelayTask,
    attempts: Sequence[Attempt],
    now: datetime,
    schedule: str | None = None,
    trace: str | None = None,
) -> list[LifeEvent]:
    """Return what happened to a task, and what happens next, in the order of time.

    `schedule` is the name of the recurring schedule that made the task, and `trace` the id of the
    trace of the call that scheduled it, if they are known.
    """
    title = f"Scheduled by the recurring schedule {schedule}" if schedule else "Scheduled"
    delay = f"with a delay of {show_duration(task.delay_s)}" if task.delay_s else "for now"
    detail = f"{delay}, in the trace {trace}" if trace else delay
    events = [LifeEvent(task.create_time, "scheduled", title, detail)]
    events += (_attempt(each) for each in attempts)
    events += _last_run(task, attempts)
    past = [each for each in events if each.at is None or each.at <= now]
    past.sort(key=lambda each: each.at or task.create_time or now)
    return past + list(_next(task, now))


def _attempt(each: Attempt) -> LifeEvent:
    took = ""
    if each.began is not None:
        took = f" after {show_duration((each.ended - each.began).total_seconds())}"
    where = f" on {each.worker}" if each.worker else ""
    return LifeEvent(
        each.ended, "failed", f"Attempt {each.number} failed{where}{took}", last_line(each.error)
    )


def _last_run(task: DelayTask, attempts: Sequence[Attempt]) -> Iterator[LifeEvent]:
    began, where = task.execution_time, f" by {task.worker}" if task.worker else ""
    known = {each.began for each in attempts}
    if began is not None and began not in known:
        late = (began - task.due).total_seconds()
        detail = f"{show_duration(late)} after it was due" if late > 0.0005 else "on time"
        yield LifeEvent(began, "running", f"Claimed{where}", detail)
    if task.status in _ENDS and not (task.status is Status.FAILED and attempts):
        took = ""
        if task.status is Status.DONE and began is not None and task.update_time is not None:
            took = f"after {show_duration((task.update_time - began).total_seconds())}"
        if task.status is not Status.DONE:
            took = last_line(task.error) if task.error else ""
        kind = _ENDS[task.status]
        yield LifeEvent(task.update_time, kind, kind.capitalize(), took)


def _next(task: DelayTask, now: datetime) -> Iterator[LifeEvent]:
    if task.status is Status.RUNNING:
        yield LifeEvent(
            task.lease_until, "running", "Its lease ends, unless it is renewed", "", True
        )
    if task.status not in (Status.NOT_COMPLETE, Status.HELD):
        return
    is_retry = task.attempts > 0 and task.error is not None
    if task.status is Status.HELD:
        title = "Held: due when a pause or a limit lets it start"
    elif task.expected_time <= now:
        title = "Due: waits for a worker"
    else:
        title = f"Retry {task.attempts}" if is_retry else "Due"
    yield LifeEvent(task.expected_time, "waiting", title, "", True)
