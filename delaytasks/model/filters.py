"""The filters of tasks: their names, their checks and the checked values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, TypedDict, TypeVar

from delaytasks.model.clock import json_fields
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import (
    Spread,
    check_id,
    check_instant,
    check_key,
    check_meta,
    check_queue,
    check_tag,
    invalid,
)
from delaytasks.model.moves import LIVE, MOVES, Status
from delaytasks.model.text import shown

#: The longest pattern of error texts.
MAX_ERROR_PATTERN = 1000
#: The most ids that one filter names.
MAX_IDS = 1000
#: One status or several.
Statuses = Status | str | Iterable[Status | str]
#: The ids of some tasks.
Ids = int | str | Iterable[int | str]


class Filters(TypedDict, total=False):
    """Conditions that a task must all match. Times are at or after `since` and before `until`."""

    tag: str | None
    #: Up to `MAX_IDS` ids.
    ids: Ids | None
    key: str | None
    key_prefix: str | None
    status: Statuses | None
    queue: str | None
    #: Pairs that the task has, perhaps among others.
    meta: Mapping[str, str] | None
    #: What the text of the last error matches; `*` stands for any text.
    error: str | None
    #: The due time.
    since: datetime | None
    until: datetime | None
    #: The time of the call that scheduled the task.
    created_since: datetime | None
    created_until: datetime | None
    #: The time of the last change.
    updated_until: datetime | None


@dataclass(frozen=True, slots=True)
class Filter:
    """The checked `Filters` of one call."""

    tag: str | None = None
    ids: frozenset[int] | None = None
    key: str | None = None
    key_prefix: str | None = None
    status: frozenset[Status] | None = None
    queue: str | None = None
    meta: tuple[tuple[str, str], ...] | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    created_since: datetime | None = None
    created_until: datetime | None = None
    updated_until: datetime | None = None

    @property
    def has_own_index(self) -> bool:
        """Whether few rows match the tag, the ids or the key, so that an index of statuses is no
        help."""
        return self.tag is not None or self.ids is not None or self.key is not None

    def as_json(self) -> dict[str, Any]:
        """Return the conditions that were given."""
        names = Filters.__annotations__
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.ids is not None:  # as texts, because numbers of JavaScript are too short for ids
            given["ids"] = [str(id) for id in sorted(self.ids)]
        if self.status is not None:
            statuses = sorted(status.name for status in self.status)
            given["status"] = statuses[0] if len(statuses) == 1 else statuses
        if self.meta is not None:
            given["meta"] = dict(self.meta)
        return json_fields(given)


def check_error(pattern: object) -> str:
    """Check a pattern of error texts, which may have several lines."""
    if not isinstance(pattern, str) or not pattern.strip("*") or "\0" in pattern:
        raise invalid("error", f"names a part of the text, as '*timeout*', not {shown(pattern)}")
    if len(pattern) > MAX_ERROR_PATTERN:
        raise invalid("error", f"has at most {MAX_ERROR_PATTERN} characters, not {len(pattern)}")
    return pattern


def check_status(status: object) -> Status:
    """Convert the name or the number of a status."""
    try:
        if isinstance(status, str):
            return Status[status.upper()]
        if isinstance(status, int) and not isinstance(status, bool):
            return Status(status)
    except (KeyError, ValueError):
        pass
    raise InvalidInputError(
        f"status is one of {', '.join(s.name for s in Status)}, not {shown(status)}", "status"
    )


def check_statuses(status: object) -> frozenset[Status]:
    """Convert one status or several."""
    return frozenset(map(check_status, _one_or_several(status, "status")))


def check_ids(ids: object) -> frozenset[int]:
    """Convert one id or several."""
    return frozenset(check_id(id, "ids") for id in _one_or_several(ids, "ids"))


def _one_or_several(given: object, argument: str) -> list[object]:
    if isinstance(given, (str, bytes, int, Mapping)) or not isinstance(given, Iterable):
        return [given]
    values = list(islice(given, MAX_IDS + 1))
    if not 0 < len(values) <= MAX_IDS:
        rule = f"{argument}: name 1 to {MAX_IDS:,} in one call, or leave it out"
        raise InvalidInputError(rule, argument)
    return values


_INSTANTS = ("since", "until", "created_since", "created_until", "updated_until")
_CHECKS: dict[str, Callable[[object], Any]] = {
    **{name: partial(check_instant, argument=name) for name in _INSTANTS},
    "tag": check_tag,
    "ids": check_ids,
    "key": check_key,
    "key_prefix": partial(check_key, argument="key_prefix"),
    "status": check_statuses,
    "queue": check_queue,
    "error": check_error,
    "meta": lambda meta: tuple(check_meta(meta).items()) or None,
}


def filter_of(filters: Mapping[str, Any]) -> Filter:
    """Check the filters; None means that a filter is not given."""
    known = Filters.__annotations__
    if unknown := ", ".join(sorted(filters.keys() - known.keys())):
        problem = f"{unknown}: tasks are not named by that (known: {', '.join(known)})"
        raise InvalidInputError(problem, unknown.partition(",")[0])
    given = {name: value for name, value in filters.items() if value is not None}
    return Filter(**{name: _CHECKS[name](value) for name, value in given.items()})


# -- Operations on all tasks that match a filter --------------------------------------------------


#: The new due time of rescheduled tasks: an instant, a shift, times in a period, or None if it
#: stays.
To = datetime | timedelta | Spread | None


@dataclass(frozen=True, slots=True)
class BulkFilter:
    """The tasks that one bulk operation moves."""

    move: str
    where: Filter
    #: Only the tasks that this operation has cancelled, by its id, and that have not moved since.
    cancelled_by: int | None = None

    @property
    def movable(self) -> frozenset[Status]:
        return self.looked_at & MOVES[self.move].sources

    @property
    def looked_at(self) -> frozenset[Status]:
        """The statuses of the tasks to find. A running task is found in order to be refused.

        A rerun finds cancelled tasks only with `status="CANCELLED"`.
        """
        if self.where.status is not None:
            return self.where.status
        return LIVE if MOVES[self.move].sources <= LIVE else frozenset({Status.FAILED})


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One operation on many tasks, as `delays.bulk.log` returns it.

    Attributes
    ----------
    id
        The id of the entry.
    action
        `"cancel"`, `"reschedule"` or `"rerun"`.
    filter
        The conditions of the call, as a JSON value.
    actor
        The user of the process, or the `actor` of the call.
    state
        `"running"`, `"done"`, `"stopped"` or `"failed"`. If the process died, the state stays
        `"running"` and `seen_at` no longer changes.
    started_at, seen_at, finished_at
        The start, the last step and the end, by the clock of the database.
    matched, changed, refused
        The counts of `BulkResult`.

    Examples
    --------
    >>> [(entry.actor, entry.action, entry.changed) for entry in delays.bulk.log()]
    [('maria', 'cancel', 1200)]
    """

    id: int
    action: str
    filter: dict[str, Any]
    actor: str
    state: str
    started_at: datetime
    seen_at: datetime
    finished_at: datetime | None
    matched: int
    changed: int
    refused: int

    def as_json(self) -> dict[str, Any]:
        return json_fields({**asdict(self), "id": str(self.id)})


def new_due(id: int, due: datetime, to: To, now: datetime | None) -> datetime | None:
    """Return the due time that a bulk operation gives a task; None if it gives none."""
    if not isinstance(to, timedelta | Spread) or now is None:
        return to if isinstance(to, datetime) else None
    try:
        if isinstance(to, Spread):
            return to.of(id, max(due, now))  # overdue tasks are distributed from now on
        return max(due + to, now)  # a time in the past means now
    except OverflowError:  # another program's row, due at the end of time
        return due


# -- Batches of items -----------------------------------------------------------------------------


T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, the last of which may be shorter."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
