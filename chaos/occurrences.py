"""Reads the tasks of recurring schedules: each is a call that the schedule has made."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from chaos.celery_messages import MOST_RUNS
from chaos.history import CallRecord, History, Occurrence, RowChange
from delaytasks import DelayedTask, Status
from delaytasks.model.clock import to_us
from delaytasks.model.inputs import CELERY_PREFIX
from delaytasks.model.moves import FINISHED


def read_occurrences(history: History, rows: Iterable[DelayedTask]) -> dict[str, list[Occurrence]]:
    """Return the occurrences with a task by schedule, ordered by time.

    A call for each task is added to the history. Rows without the key of an occurrence are left
    out.
    """
    changes: dict[int, list[RowChange]] = {}
    for change in history.changes:
        changes.setdefault(change.id, []).append(change)
    found: dict[str, list[Occurrence]] = {}
    for row in rows:
        name, separator, at = (row.key or "").partition("@")
        if not separator:
            continue
        at_us = to_us(datetime.fromisoformat(at.replace("Z", "+00:00")))
        made, last = changes[row.id][0], changes[row.id][-1]
        history.call_records += _calls(row, at_us, made, last)
        ended_us = last.at_us if last.status in FINISHED else None
        found.setdefault(name, []).append(Occurrence(at_us, made.at_us, ended_us))
    for some in found.values():
        some.sort(key=lambda each: each.at_us)
    return found


def _calls(row: DelayedTask, due_us: int, made: RowChange, last: RowChange) -> list[CallRecord]:
    is_celery = row.tag.startswith(CELERY_PREFIX)
    most_runs = MOST_RUNS if is_celery else 1
    calls = [
        CallRecord(row.id, "schedule", "ok", made.at_us, made.at_us, due_us, most_runs, is_celery)
    ]
    if row.status is Status.CANCELLED:  # by a pause of the schedule
        calls.append(CallRecord(row.id, "cancel", "unknown", last.at_us, last.at_us))
    return calls
