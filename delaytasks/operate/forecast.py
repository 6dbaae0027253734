"""What becomes due in each hour of the next days, and whether the processes of the workers suffice.

A forecast counts the waiting tasks of each hour, adds the occurrences of recurring schedules that
have no task yet, and multiplies them with the mean duration that workers have measured for their
tag. The sum is the time for which all processes are busy. If it is longer than an hour, tasks of
the hour start late, and the rest is work of the next hour. Limits of tags, retries, and tasks that
are scheduled later are left out.

On PostgreSQL the cost is bounded, however many tasks wait: see `_waiting`.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Select,
    case,
    func,
    literal,
    select,
    tablesample,
)

from delaytasks.db.searching import has_status, queue_levels
from delaytasks.db.types import epoch_s
from delaytasks.model.clock import from_us
from delaytasks.model.errors import DelayTaskError, InvalidInputError, StoreError
from delaytasks.model.inputs import check_integer, is_number, show_duration
from delaytasks.model.moves import WAITING
from delaytasks.model.text import count, shown, some_values
from delaytasks.model.workers import RegisteredWorker
from delaytasks.operate.state_queries import estimate_rows
from delaytasks.statistics.reading import checked_range, counts_by_tag

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.recurring.creation import RecurringTable
    from delaytasks.runtime import Runtime

HOUR_S = 3600
MAX_DAYS, MAX_PROCESSES = 92, 1_000_000
#: The duration of a task of which nothing is known, in seconds.
ASSUMED_DURATION_S = 0.05
#: The time before now whose runs count, and the runs that a mean needs.
MEASURED, LEAST_MEASURED_RUNS = "2d", 10
#: Up to this number, PostgreSQL counts waiting rows exactly.
MAX_EXACT = 200_000
#: The most rows of a day, queue and priority that are counted.
MAX_COUNTED = 1_000_000
#: About this number of waiting rows is in a sample, for which about this number of rows is read.
SAMPLED, MAX_READ = 100_000, 500_000
#: The most recurring schedules that are read, and the most occurrences that are computed.
MAX_SCHEDULES, MAX_OCCURRENCES = 20_000, 50_000
#: Names in one note.
MAX_NAMES = 5

#: A queue, a tag and an hour, which is a number of hours since 1970.
DueKey = tuple[str, str, int]
#: Numbers of tasks. An estimate may be a fraction.
Due = defaultdict[DueKey, float]


@dataclass(frozen=True, slots=True)
class TagForecast:
    """The tasks of one tag in the time of a forecast.

    Attributes
    ----------
    tag
        The tag.
    due
        The number of tasks that become due.
    duration_s
        The seconds for which one task occupies a process.
    is_measured
        Whether workers have measured the duration. Otherwise it is assumed.

    Examples
    --------
    >>> [(tag.tag, tag.due) for tag in delays.forecast().tags]
    [('newsletter.send', 1200000), ('mail.send', 3150)]
    """

    tag: str
    due: int
    duration_s: float
    is_measured: bool


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
    queue
        The queue that these processes serve, if they are busier than those of all workers together;
        else None.
    late_s
        How late tasks start at the end of the hour, in seconds, because of work that is left of
        this hour and of earlier ones.

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
    queue: str | None = None
    late_s: float = 0.0

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
    paused
        The number of these that do not run, because their tag or queue is paused.
    is_estimate
        Whether the numbers of tasks are estimates, because there are too many to count.
    hours
        The hours in which tasks become due, in order.
    tags
        The tags, the one with the most tasks first.
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
    paused: int
    is_estimate: bool
    hours: tuple[ForecastHour, ...]
    tags: tuple[TagForecast, ...]
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
        document = asdict(self)
        for name in ("made_at", "until"):
            document[name] = document[name].isoformat()
        for hour, found in zip(document["hours"], self.hours, strict=True):
            hour |= {"start": found.start.isoformat(), "utilization": found.utilization}
        first = self.first_full
        return {**document, "first_full": None if first is None else first.start.isoformat()}


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
        end, late_s = _late_from(full, found)
        return (
            f"From {_busy(full, show)}. {needed} would run them within the hour. Tasks start up to "
            f"{show_duration(late_s)} late, until {show(end)}."
        )
    if (peak := found.peak) is not None:
        return f"The processes suffice. The busiest hour is {_busy(peak, show)}."
    return "Nothing becomes due."


def _late_from(full: ForecastHour, found: Forecast) -> tuple[datetime, float]:
    """Return until when tasks start late from this hour on, and how late in the worst case."""
    end, most_s = full.start, 0.0
    for hour in found.hours:
        if hour.late_s and full.start <= hour.start <= end:
            end = hour.start + timedelta(seconds=HOUR_S + hour.late_s)
            most_s = max(most_s, hour.late_s)
    return end, most_s


def busiest(found: Forecast, most: int) -> list[ForecastHour]:
    """Return the hours that keep the processes busiest, in the order of time."""
    ranked = sorted(found.hours, key=lambda hour: (hour.busy_s, hour.due))
    return sorted(ranked[-most:], key=lambda hour: hour.start)


def _busy(hour: ForecastHour, show: Callable[[datetime], str]) -> str:
    """Return, for example, "09:00: 4 tasks of mail.send keep 2 processes busy for 1s"."""
    tag, due = next(iter(hour.due_by_tag.items()))
    whose = f" of {tag}" if due >= hour.due else f" ({due:,} of {tag})"
    processes = count(hour.processes, "process", "processes")
    served = "" if hour.queue is None else f" that serve the queue {hour.queue}"
    verb = "keeps" if hour.due == 1 else "keep"
    return (
        f"{show(hour.start)}: {count(hour.due, 'task')}{whose} {verb} {processes}{served} busy for "
        f"{show_duration(hour.busy_s)}"
    )


# -- make -----------------------------------------------------------------------------------------


def make_forecast(runtime: Runtime, days: float = 7, processes: int | None = None) -> Forecast:
    """Do what `DelayTasks.forecast` does."""
    if not is_number(days, 0, MAX_DAYS) or days == 0:
        raise InvalidInputError(
            f"days is a number above 0, at most {MAX_DAYS}, not {shown(days)}", "days"
        )
    if processes is not None:
        check_integer(processes, "processes", 1, MAX_PROCESSES)
    now = runtime.clock.certain_now()
    until = now + timedelta(days=days)
    due, is_estimate = _due(runtime, now, until)
    registered = runtime.store.workers.registered(now, runtime.settings.silent_s)
    workers = [worker for worker in registered if worker.is_alive]
    policies = runtime.store.policies.read()
    notes = []
    if processes is None and not workers:
        processes = runtime.celery.conf.worker_concurrency or os.cpu_count() or 1
        notes.append("No worker is alive, so the number of processes is assumed.")
    capacity = _capacity({queue for queue, _, _ in due}, workers, processes)
    if unserved := sorted(queue for queue in capacity if queue and not capacity[queue]):
        notes.append(f"No worker serves the queues {some_values(unserved, MAX_NAMES)}.")
    tags = _tags(runtime, due, now)
    if assumed := sorted(tag for tag, found in tags.items() if not found.is_measured):
        notes.append(
            f"A duration of {show_duration(ASSUMED_DURATION_S)} is assumed for tags without "
            f"measurements: {some_values(assumed, MAX_NAMES)}."
        )
    limited = {each.name for each in policies if each.kind == "tag" and any(each.limits)}
    if left_out := sorted(limited & tags.keys()):
        notes.append(f"The limits of tags are left out: {some_values(left_out, MAX_NAMES)}.")
    is_paused = {(each.kind, each.name) for each in policies if each.is_paused}
    paused = {key for key in due if ("queue", key[0]) in is_paused or ("tag", key[1]) in is_paused}
    return Forecast(
        made_at=now,
        until=until,
        processes=capacity[None],
        due=sum(tag.due for tag in tags.values()),
        paused=round(sum(due[key] for key in paused)),
        is_estimate=is_estimate,
        hours=tuple(_hours(due, paused, tags, capacity)),
        tags=tuple(sorted(tags.values(), key=lambda tag: (-tag.due, tag.tag))),
        notes=tuple(notes),
    )


def _due(runtime: Runtime, now: datetime, until: datetime) -> tuple[Due, bool]:
    """Return the waiting tasks and the occurrences, and whether their numbers are estimates."""
    due, is_estimate = _waiting(runtime.store, now, until)
    if runtime.store.sweeps.has_due_schedule((until - now).total_seconds()):
        is_estimate |= _add_occurrences(due, runtime.recurring_table, now, until)
    return due, is_estimate


def _capacity(
    queues: Collection[str], workers: Collection[RegisteredWorker], given: int | None
) -> dict[str | None, int]:
    """Return the processes that serve each queue, and those of all workers under None."""
    return {
        queue: given
        or sum(max(each.concurrency, 1) for each in workers if not queue or each.serves(queue))
        for queue in (None, *queues)
    }


def _tags(runtime: Runtime, due: Due, now: datetime) -> dict[str, TagForecast]:
    measured, tasks = _mean_durations(runtime, now), defaultdict[str, float](float)
    for (_, tag, _), number in due.items():
        tasks[tag] += number
    found: dict[str, TagForecast] = {}
    for tag, number in tasks.items():
        processor = runtime.registry.get(tag)
        # A process runs so many tasks concurrently, or in one batch.
        together = 1 if processor is None else max(processor.in_flight or 1, processor.batch or 1)
        duration_s = measured.get(tag, ASSUMED_DURATION_S) / together
        found[tag] = TagForecast(tag, round(number), duration_s, tag in measured)
    return found


def _hours(
    due: Due,
    paused: Collection[DueKey],
    tags: Mapping[str, TagForecast],
    capacity: Mapping[str | None, int],
) -> Iterator[ForecastHour]:
    """Yield the hours, each with the processes that are busy for the longest time.

    Work for which an hour has no time is left for the next hours.
    """
    by_tag: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    needed_s: dict[int, dict[str | None, float]] = defaultdict(lambda: defaultdict(float))
    for key, tasks in due.items():
        queue, tag, hour = key
        by_tag[hour][tag] += tasks
        if key not in paused and capacity[queue]:
            needed_s[hour][None] += tasks * tags[tag].duration_s
            needed_s[hour][queue] += tasks * tags[tag].duration_s
    work_s = dict.fromkeys(capacity, 0.0)
    before = 0
    for hour, counts in sorted(by_tag.items()):
        busy: dict[str | None, float] = {None: 0.0}
        busy |= {queue: seconds / capacity[queue] for queue, seconds in needed_s[hour].items()}
        queue_of = max(busy, key=lambda queue: busy[queue])
        passed_s, before = HOUR_S * (hour - before), hour
        for name, left_s in work_s.items():
            work_s[name] = max(left_s - passed_s, 0.0) + busy.get(name, 0.0)
        largest = sorted(counts.items(), key=lambda item: -item[1])
        yield ForecastHour(
            from_us(hour * HOUR_S * 1_000_000),
            round(sum(counts.values())),
            {tag: round(tasks) for tag, tasks in largest},
            busy[queue_of],
            capacity[queue_of],
            queue_of,
            max(0.0, max(work_s.values()) - HOUR_S),
        )


def _mean_durations(runtime: Runtime, now: datetime) -> dict[str, float]:
    """Return the mean duration of a call for each tag with enough runs."""
    try:
        found = counts_by_tag(runtime.store, *checked_range(now, MEASURED, None), None)
    except StoreError:  # for example, there are no tables of statistics yet
        return {}
    return {
        tag: counts.duration_s / counts.started
        for tag, counts in found
        if counts.started >= LEAST_MEASURED_RUNS
    }


def _add_occurrences(due: Due, table: RecurringTable, now: datetime, until: datetime) -> bool:
    """Add the occurrences up to `until` that have no rows yet.

    Return whether some are estimates: the first occurrences of a schedule with very many are
    computed, and the others follow from their mean interval.
    """
    coming = [
        (each, max(each.next_at, now))
        for each in table.page(None, None, None, MAX_SCHEDULES)
        if each.next_at is not None and each.next_at <= until
    ]
    most = max(MAX_OCCURRENCES // max(len(coming), 1), 5)
    is_estimate = False
    for schedule, first in coming:
        try:
            times = [first, *islice(schedule.between(first, until), most)]
        except DelayTaskError:  # another program wrote the timing; the sweep reports it
            continue
        for at in times:
            due[schedule.queue, schedule.tag, int(at.timestamp()) // HOUR_S] += 1
        if len(times) > most:
            is_estimate = True
            interval_s = max((times[-1] - first).total_seconds() / most, 1.0)
            begin, end = times[-1].timestamp() + interval_s, until.timestamp()
            while begin < end:
                in_hour_s = min(HOUR_S - begin % HOUR_S, end - begin)
                due[schedule.queue, schedule.tag, int(begin // HOUR_S)] += in_hour_s / interval_s
                begin += in_hour_s
    return is_estimate


# -- the waiting rows -----------------------------------------------------------------------------


def _waiting(store: Store, now: datetime, until: datetime) -> tuple[Due, bool]:
    """Count the rows that are due up to `until`, and return whether the numbers are estimates.

    If very many rows wait, PostgreSQL reads a random sample of the table's blocks. Other databases
    have no samples, and count all rows through the index that claims use. A statement counts one
    day of a queue and priority, and a limited number of rows, because an answer that takes longer
    than `ANSWER_LIMIT_S` ends all connections.
    """
    t = store.schema.tasks
    due = t.c.expected_time
    ends = [*(now + timedelta(days=n) for n in range(1, (until - now).days + 1)), until]

    def read(connection: Connection) -> tuple[Due, bool]:
        found: Due = defaultdict(float)
        if store.database.can.block_samples:
            waiting = estimate_rows(connection, select(t.c.id).where(has_status(t, *WAITING)))
            if waiting > MAX_EXACT:
                all_rows = estimate_rows(connection, select(t.c.id))
                percent = 100 * min(SAMPLED / waiting, MAX_READ / max(all_rows, 1), 1.0)
                # With a seed, two forecasts of an unchanged table are the same.
                sample = tablesample(t, func.system(literal(percent)), seed=literal(0))
                waits = sample.c.status.in_([int(status) for status in WAITING])
                rows = _columns(sample).where(waits, sample.c.expected_time <= until)
                for key, tasks in _grouped(connection, rows, now):
                    found[key] = tasks * 100 / percent
                return found, True
        is_estimate = False
        for status in WAITING:
            for queue, priority in queue_levels(connection, t, status):
                here = [has_status(t, status), t.c.queue == queue, t.c.priority == priority]
                since: list[ColumnElement[bool]] = []  # the first day has all overdue rows
                for end in ends:
                    rows = _columns(t).where(*here, *since, due <= end).limit(MAX_COUNTED)
                    counted = 0
                    for key, tasks in _grouped(connection, rows, now):
                        found[key] += tasks
                        counted += tasks
                    is_estimate |= counted == MAX_COUNTED
                    since = [due > end]
        return found, is_estimate

    return store.database.autocommitted(read)


def _columns(t: FromClause) -> Select[Any]:
    return select(t.c.queue, t.c.tag, t.c.expected_time)


def _grouped(
    connection: Connection, query: Select[Any], now: datetime
) -> Iterator[tuple[DueKey, int]]:
    """Count rows by queue, tag and hour. Overdue rows count in the hour of `now`."""
    rows = query.subquery()
    due = rows.c.expected_time
    second = case((due <= now, int(now.timestamp())), else_=epoch_s(due))
    hour = (second - second % HOUR_S).label("due_hour")
    groups = select(rows.c.queue, rows.c.tag, hour, func.count())
    for queue, tag, begin, tasks in connection.execute(groups.group_by("queue", "tag", "due_hour")):
        yield (queue, tag, begin // HOUR_S), tasks
