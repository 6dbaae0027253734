"""What becomes due in each hour of the next days, and whether the processes of the workers suffice.

A forecast counts the waiting tasks of each hour, adds the occurrences of recurring schedules that
have no task yet, and multiplies them with the mean duration that workers have measured for their
tag. The sum, divided by the number of processes, is the time for which all of them are busy. If it
is longer than an hour, tasks start late. Pauses and limits, retries, tasks that are scheduled
later, and queues with workers of their own are left out.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, func, select

from delaytasks.model.clock import AN_HOUR, hour_of, json_fields
from delaytasks.model.errors import DelayTaskError, InvalidInputError
from delaytasks.model.inputs import check_integer, is_number, show_duration
from delaytasks.model.moves import WAITING
from delaytasks.model.text import count, shown, some_values
from delaytasks.operate.statistics import COUNTS_KEPT, counts_by_tag
from delaytasks.operate.why import Facts
from delaytasks.run.observers import RunCounts

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.recurring.creation import RecurringTable
    from delaytasks.runtime import Runtime

HOUR_S = 3600
MAX_DAYS, MAX_PROCESSES = 92, 1_000_000
#: The duration of a task of which nothing is known, in seconds.
ASSUMED_DURATION_S = 0.05
#: The runs that a mean needs.
LEAST_MEASURED_RUNS = 10
#: The most rows that are counted.
MAX_COUNTED = 5_000_000
#: The most recurring schedules that are read, and the most occurrences that are computed.
MAX_SCHEDULES, MAX_OCCURRENCES = 20_000, 200_000
#: Names in one note.
MAX_NAMES = 5

#: The number of tasks of each tag, by the start of the hour.
Due = defaultdict[datetime, Counter[str]]


@dataclass(frozen=True, slots=True)
class ForecastHour:
    """One hour of a forecast.

    Attributes
    ----------
    start
        The begin of the hour. Hours without tasks are left out.
    due
        The number of tasks that become due. Overdue tasks count in the first hour.
    due_by_tag
        The same for each tag, the largest first.
    busy_s
        The seconds for which these tasks keep the processes busy.
    processes
        The number of these processes.

    Examples
    --------
    >>> hour = delays.forecast().peak
    >>> hour.due, hour.busy_s, hour.utilization
    (240000, 9000.0, 2.5)
    """

    start: datetime
    due: int
    due_by_tag: dict[str, int]
    busy_s: float
    processes: int

    @property
    def utilization(self) -> float:
        """The share of the hour for which the processes are busy. Above 1, tasks start late."""
        return self.busy_s / HOUR_S

    @property
    def needed_processes(self) -> int:
        """The number of processes that run these tasks within the hour."""
        return math.ceil(self.utilization * self.processes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What becomes due in the next days, and how busy it keeps the processes.

    Attributes
    ----------
    made_at, until
        The time of the forecast, and the end of the time that it covers.
    processes
        The number of processes of all workers.
    due
        The number of tasks that become due, including the overdue ones.
    is_cut
        Whether there are more tasks, which were not counted. Those that are due first were.
    hours
        The hours in which tasks become due, in order.
    durations_s
        By tag, the seconds for which one of these tasks occupies a process.
    notes
        Sentences about what the forecast assumes or leaves out.

    Examples
    --------
    >>> forecast = delays.forecast(days=7)
    >>> forecast.first_full.start, forecast.first_full.utilization
    (datetime.datetime(2026, 11, 30, 9, 0, tzinfo=datetime.timezone.utc), 2.5)
    """

    made_at: datetime
    until: datetime
    processes: int
    due: int
    is_cut: bool
    hours: tuple[ForecastHour, ...]
    durations_s: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> ForecastHour | None:
        """The hour that keeps the processes busy for the longest time."""
        return max(self.hours, key=lambda hour: hour.busy_s, default=None)

    @property
    def first_full(self) -> ForecastHour | None:
        """The first hour whose tasks need more time than the processes have."""
        return next((hour for hour in self.hours if hour.utilization > 1), None)

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON document."""
        first = self.first_full
        hours = [json_fields({**asdict(h), "utilization": h.utilization}) for h in self.hours]
        document = {**asdict(self), "hours": hours, "first_full": first and first.start}
        return json_fields(document)


# -- in words -------------------------------------------------------------------------------------


def headline(found: Forecast, show: Callable[[datetime], str]) -> str:
    """Return what matters most: the first hour that is too full, else the busiest hour.

    Parameters
    ----------
    found
        The forecast.
    show
        Shows the start of an hour, as the reader sees times.
    """
    if (full := found.first_full) is not None:
        needed = count(full.needed_processes, "process", "processes")
        return f"From {_busy(full, show)}. {needed} would run them within the hour."
    if (peak := found.peak) is not None:
        return f"The processes suffice. The busiest hour is {_busy(peak, show)}."
    return "Nothing becomes due."


def busiest(found: Forecast, most: int) -> list[ForecastHour]:
    """Return the hours that keep the processes busiest, in the order of time."""
    ranked = sorted(found.hours, key=lambda hour: (hour.busy_s, hour.due))
    return sorted(ranked[-most:], key=lambda hour: hour.start)


def _busy(hour: ForecastHour, show: Callable[[datetime], str]) -> str:
    """Return, for example, "09:00: 4 tasks of mail.send keep 2 processes busy for 1s"."""
    tag, due = next(iter(hour.due_by_tag.items()))
    whose = f" of {tag}" if due >= hour.due else f" ({due:,} of {tag})"
    processes = count(hour.processes, "process", "processes")
    verb = "keeps" if hour.due == 1 else "keep"
    return (
        f"{show(hour.start)}: {count(hour.due, 'task')}{whose} {verb} {processes} busy for "
        f"{show_duration(hour.busy_s)}"
    )


# -- make -----------------------------------------------------------------------------------------


def make_forecast(runtime: Runtime, days: float = 7, processes: int | None = None) -> Forecast:
    """Do what `DelayTasks.forecast` does."""
    if not is_number(days, 0, MAX_DAYS) or days == 0:
        rule = f"days is a number above 0, at most {MAX_DAYS}, not {shown(days)}"
        raise InvalidInputError(rule, "days")
    facts, notes = Facts(runtime), list[str]()
    now, until = facts.now, facts.now + timedelta(days=days)
    if processes is not None:
        check_integer(processes, "processes", 1, MAX_PROCESSES)
    else:
        processes = sum(max(worker.concurrency, 1) for worker in facts.alive)
        if not processes:
            processes = runtime.celery.conf.worker_concurrency or os.cpu_count() or 1
            notes.append("No worker is alive, so the number of processes is assumed.")
    due = Due(Counter)
    is_cut = _add_waiting(due, runtime.store, now, until)
    if runtime.store.sweeps.has_due_schedule((until - now).total_seconds()):
        is_cut |= _add_occurrences(due, runtime.recurring_table, now, until)
    durations_s, assumed = dict[str, float](), list[str]()
    measured = counts_by_tag(runtime.store, now - COUNTS_KEPT, now)
    for tag in sorted({tag for tasks in due.values() for tag in tasks}):
        counts, processor = measured.get(tag, RunCounts()), runtime.registry.get(tag)
        duration_s = ASSUMED_DURATION_S
        if counts.started >= LEAST_MEASURED_RUNS:
            duration_s = counts["duration_s"] / counts.started
        else:
            assumed.append(tag)
        # A process runs so many tasks concurrently, or in one batch.
        together = 1 if processor is None else max(processor.in_flight or 1, processor.batch or 1)
        durations_s[tag] = duration_s / together
    if assumed:
        notes.append(
            f"A duration of {show_duration(ASSUMED_DURATION_S)} is assumed for tags without "
            f"measurements: {some_values(assumed, MAX_NAMES)}."
        )
    hours = []
    for hour, tasks in sorted(due.items()):
        busy_s = sum(number * durations_s[tag] for tag, number in tasks.items()) / processes
        by_tag = dict(tasks.most_common())
        hours.append(ForecastHour(hour, tasks.total(), by_tag, busy_s, processes))
    number = sum(hour.due for hour in hours)
    return Forecast(now, until, processes, number, is_cut, tuple(hours), durations_s, tuple(notes))


def _add_waiting(due: Due, store: Store, now: datetime, until: datetime) -> bool:
    """Count the rows that are due up to `until`, those that are due first.

    Return whether there are more. Overdue rows count in the present hour. A statement counts the
    rows of one hour, because an answer that takes longer than `ANSWER_LIMIT_S` ends all
    connections.
    """
    t = store.schema.tasks.c
    waits = select(t.tag).where(t.status.in_([int(status) for status in WAITING]))

    def read(connection: Connection) -> bool:
        hour, left, rows = hour_of(now), MAX_COUNTED, waits
        while hour < until and left > 0:
            end = hour + AN_HOUR
            c = rows.where(t.expected_time < min(end, until)).limit(left).subquery().c
            for tag, tasks in connection.execute(select(c.tag, func.count()).group_by(c.tag)):
                due[hour][tag] += tasks
                left -= tasks
            hour, rows = end, waits.where(t.expected_time >= end)
        return left <= 0

    return store.database.autocommitted(read)


def _add_occurrences(due: Due, table: RecurringTable, now: datetime, until: datetime) -> bool:
    """Add the first occurrences up to `until` of each schedule that have no rows yet.

    Return whether there are more.
    """
    coming = [
        (each, max(each.next_at, now))
        for each in table.page(None, None, None, MAX_SCHEDULES)
        if each.next_at is not None and each.next_at <= until
    ]
    most, has_more = MAX_OCCURRENCES // max(len(coming), 1), False
    for schedule, first in coming:
        try:
            times = [first, *islice(schedule.between(first, until), most)]
        except DelayTaskError:  # another program wrote the timing; the sweep reports it
            continue
        for at in times:
            due[hour_of(at)][schedule.tag] += 1
        has_more |= len(times) > most
    return has_more
