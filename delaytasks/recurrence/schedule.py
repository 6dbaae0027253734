"""A recurring schedule as callers and the sweep read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Literal

from delaytasks.core.body import decoded, is_encrypted, placeholder
from delaytasks.core.clock import LATEST
from delaytasks.core.inputs import decode_meta
from delaytasks.recurrence.timing import EVERY, Timing, parse_timing

Missed = Literal["latest", "skip", "all"]
Overlap = Literal["allow", "skip"]
#: The fields that callers define. The other fields of a schedule change while it recurs.
DEFINED = (
    "tag body_json queue priority headers_json concurrency_key timing tz jitter_s missed "
    "most_missed overlap"
).split()


#: The name of the meta in the headers of a schedule, which has no column for it.
META = "meta"


@dataclass(frozen=True, slots=True)
class RecurringSchedule:
    """A row of `yb_delay_recurring` as it was when it was read.

    Attributes
    ----------
    name
        The name.
    tag, body_json, queue, priority, headers_json, concurrency_key
        The values of each task of the schedule. `body` decodes the body, and `meta` the meta, which
        is a part of `headers_json`.
    timing, tz, start_at
        When tasks are due: a cron expression and its time zone, or for example `"every 300"`, and
        the first occurrence of an interval or the earliest one of a cron expression.
    jitter_s
        Each task is due up to this time after its occurrence.
    missed, most_missed
        The rule for occurrences for which no task was made in time.
    overlap
        Whether an occurrence is skipped while the task before it has not ended.
    is_declared
        Whether code declares the schedule.
    is_paused
        Whether the schedule is paused.
    next_at
        The first occurrence that has no task yet. None if the schedule is paused or has ended.
    last_at, last_task_id
        The last occurrence that has a task, and the id of the last task.
    version
        The number of changes of the row.
    create_time, update_time, updated_by
        The times of the first and the last definition, and the actor of the last one.

    Examples
    --------
    >>> schedule = delays.recurring.get("report")
    >>> schedule.timing, schedule.tz
    ('0 9 * * mon-fri', 'Europe/Berlin')
    """

    name: str
    tag: str
    body_json: str
    queue: str
    priority: int
    headers_json: str | None
    concurrency_key: str | None
    timing: str
    tz: str
    start_at: datetime | None
    jitter_s: float
    missed: Missed
    most_missed: int
    overlap: Overlap
    is_declared: bool = False
    is_paused: bool = False
    next_at: datetime | None = None
    last_at: datetime | None = None
    last_task_id: int | None = None
    version: int = 0
    create_time: datetime | None = None
    update_time: datetime | None = None
    updated_by: str | None = None
    id: int = 0

    @property
    def body(self) -> Any:
        """The decoded body."""
        return decoded(self.body_json, f"the body of the recurring schedule {self.name!r}")

    @property
    def meta(self) -> dict[str, str]:
        """The meta of each task."""
        return decode_meta(task_options(self)[1])

    def parsed(self) -> Timing:
        """Return the timing, or raise `InvalidTimingError` if another program has written it."""
        return parse_timing(self.timing, self.tz, self.start_at)

    def between(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Yield the occurrences after `since`, up to `until`."""
        timing = self.parsed()
        at = timing.after(since)
        while at is not None and at <= until:
            yield at
            at = timing.after(at)

    def next(self, count: int, after: datetime) -> list[datetime]:
        """Return occurrences of the timing in UTC, whether or not the schedule is paused.

        Parameters
        ----------
        count
            The most occurrences to return.
        after
            An aware datetime. All occurrences are later.
        """
        return list(islice(self.between(after, LATEST), count))

    def key_of(self, at: datetime) -> str:
        """Return the key of the task of an occurrence."""
        shown = at.isoformat(timespec="milliseconds" if at.microsecond else "seconds")
        return f"{self.name}@{shown.removesuffix('+00:00')}Z"

    def as_json(self) -> dict[str, Any]:
        """Return the schedule as a JSON document.

        A body that no key of this process decrypts is replaced by a text that says so.
        """
        instants = "start_at next_at last_at create_time update_time".split()
        document = {field: getattr(self, field) for field in self.__slots__}
        text = document.pop("body_json")
        document["headers_json"], _ = task_options(self)
        document["meta"] = self.meta
        document["body"] = placeholder(text) if is_encrypted(text) else self.body
        for field in instants:
            document[field] = None if document[field] is None else document[field].isoformat()
        return document


def is_same_definition(known: RecurringSchedule, new: RecurringSchedule) -> bool:
    """Return whether `new`, which is not stored yet, has the definition of `known`."""
    return has_same_start(known, new) and all(getattr(known, f) == getattr(new, f) for f in DEFINED)


def has_same_start(known: RecurringSchedule, new: RecurringSchedule) -> bool:
    """Return whether `new` starts as `known`. An interval without a start keeps its own."""
    keeps_start = new.start_at is None and new.timing.startswith(f"{EVERY} ")
    return keeps_start or new.start_at == known.start_at


def check_readable(schedule: RecurringSchedule) -> None:
    """Raise `BodyEncryptedError` if no key of this process decrypts the body."""
    if is_encrypted(schedule.body_json):
        decoded(schedule.body_json, f"the body of the recurring schedule {schedule.name!r}")


def task_options(schedule: RecurringSchedule) -> tuple[str | None, str | None]:
    """Return the headers and the meta of each task, as the row of the task stores them."""
    if schedule.headers_json is None:
        return None, None
    try:
        headers = json.loads(schedule.headers_json)
        meta = headers.pop(META, None)
    except (ValueError, AttributeError, RecursionError):
        return schedule.headers_json, None  # another program has written them
    return _compact(headers), _compact(meta)


def headers_with_meta(headers_json: str | None, meta_json: str | None) -> str | None:
    """Return the headers of a schedule whose tasks have these headers and this meta."""
    if meta_json is None:
        return headers_json
    return _compact({**json.loads(headers_json or "{}"), META: json.loads(meta_json)})


def _compact(document: Any) -> str | None:
    return json.dumps(document, separators=(",", ":")) if document else None
