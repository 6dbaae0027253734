"""Explain why a task has not run, or how it ended, from facts that `storage/facts.py` has read."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Any

from delaytasks.core.durations import show_duration, show_timing
from delaytasks.core.reasons import Facts, Reason, instant_text
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.task_json import iso
from delaytasks.core.text import count, last_line
from delaytasks.core.why_waiting import why_waiting

#: A clock offset up to this many seconds is not mentioned.
CLOCK_TOLERANCE_S = 1.0


def why(facts: Facts) -> list[Reason]:
    """Return the reasons why the task has not run, the most important one first.

    For a task that runs or has ended, the first reason is its status.
    """
    status = facts.task.status
    if status in _ENDED:
        reasons = [_ENDED[status](facts)]
    elif status is Status.RUNNING:
        reasons = [_running(facts)]
    elif status in (Status.NOT_COMPLETE, Status.HELD):
        reasons = [*why_waiting(facts), *_clock(facts)]
    else:
        sentence = (
            f"Its status is {status.name}, which delaytasks does not know: no worker takes it."
        )
        reasons = [Reason("unknown_status", sentence, "", {"status": status.name})]
    return [*reasons, *_recurring(facts)]


# -- ended ----------------------------------------------------------------------------------------


def _done(facts: Facts) -> Reason:
    return Reason("done", f"It is done: it ran{_begun(facts.task)}.", "", _run(facts.task))


def _failed(facts: Facts) -> Reason:
    task, error = facts.task, last_line(facts.task.error)
    times = f" after {count(task.attempts, 'attempt')}" if task.attempts > 1 else ""
    at = "" if task.update_time is None else f" at {instant_text(task.update_time)}"
    return Reason(
        "failed",
        f"It failed{times}{at}: {error}.",
        f"To run it again: delaytasks rerun {task.id}",
        {**_run(task), "error": error},
    )


def _cancelled(facts: Facts) -> Reason:
    task, audit = facts.task, facts.cancelled_by
    at = instant_text(task.update_time)
    by = f" by {audit.actor} (entry {audit.id} of the audit)" if audit else ""
    cause = f": {last_line(task.error)}" if task.error else ""
    return Reason(
        "cancelled",
        f"It was cancelled at {at}{by}{cause}.",
        f"To run it nevertheless: delaytasks rerun {task.id}",
        {
            "at": iso(task.update_time),
            "actor": audit and audit.actor,
            "audit": audit and str(audit.id),
            "error": last_line(task.error) or None,
        },
    )


_ENDED = {Status.DONE: _done, Status.FAILED: _failed, Status.CANCELLED: _cancelled}


# -- running --------------------------------------------------------------------------------------


def _running(facts: Facts) -> Reason:
    task, until = facts.task, facts.task.lease_until
    values = {
        **_run(task),
        "lease_until": iso(until),
        "is_asked_to_stop": bool(task.cancel_request),
    }
    if until is not None and until < facts.now:
        return Reason(
            "lease_over",
            f"The worker process {task.worker} died or lost its lease at {instant_text(until)}. "
            "The next sweep gives the task to another worker.",
            "" if facts.swept_s is not None else "Check that beat or a worker runs.",
            values,
        )
    sentence = f"It runs{_begun(task)}; its lease lasts until {instant_text(until)}."
    if task.cancel_request:
        return Reason("running", f"{sentence} A caller has asked it to stop.", "", values)
    remedy = f"To ask it to stop: delaytasks cancel {task.id} --running"
    return Reason("running", sentence, remedy, values)


def _run(task: DelayTask) -> dict[str, Any]:
    began = task.execution_time
    late_s = None if began is None else round((began - task.due).total_seconds(), 3)
    return {
        "worker": task.worker,
        "began": iso(began),
        "late_s": late_s,
        "attempts": task.attempts,
    }


def _begun(task: DelayTask) -> str:
    began = task.execution_time
    if began is None:
        return ""
    late_s = (began - task.due).total_seconds()
    where = f" on {task.worker}" if task.worker else ""
    if late_s <= 0:
        return where
    return f"{where} since {instant_text(began)}, {show_duration(late_s)} after it was due"


# -- additional reasons ---------------------------------------------------------------------------


def _clock(facts: Facts) -> Iterator[Reason]:
    offset_s = facts.clock_offset_s
    if abs(offset_s) > CLOCK_TOLERANCE_S:
        ahead = "ahead of" if offset_s > 0 else "behind"
        yield Reason(
            "clock",
            f"The clock of this machine is {show_duration(offset_s)} {ahead} the clock of the "
            "database, which decides what is due.",
            "Nothing has to be done for delaytasks; compare times with those of the database.",
            {"offset_s": round(offset_s, 3)},
        )


def _recurring(facts: Facts) -> Iterator[Reason]:
    schedule = facts.schedule
    if schedule is None:
        return
    next_at = "it has no further occurrence"
    if schedule.is_paused:
        next_at = "it is paused"
    elif schedule.next_at is not None:
        next_at = f"the next occurrence without a task is at {instant_text(schedule.next_at)}"
    yield Reason(
        "recurring",
        f"It is a task of the recurring schedule {schedule.name} "
        f"({show_timing(schedule.timing)}); {next_at}.",
        f"To see its next occurrences: delaytasks recurring next {quote(schedule.name)}",
        {
            "name": schedule.name,
            "timing": schedule.timing,
            "is_paused": schedule.is_paused,
            "next_at": iso(schedule.next_at),
        },
    )
