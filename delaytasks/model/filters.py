"""The filters of tasks, and operations on all tasks that match one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, TypedDict, TypeVar

from delaytasks.model.errors import InvalidInputError
from delaytasks.model.ids import check_id
from delaytasks.model.inputs import (
    Spread,
    check_instant,
    check_key,
    check_meta,
    check_queue,
    check_status,
    check_tag,
)
from delaytasks.model.interfaces import To
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


class TagFilters(TypedDict, total=False):
    """Conditions for tasks of one tag. Times are at or after `since` and before `until`."""

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


class Filters(TagFilters, total=False):
    """Conditions that a task must all match."""

    tag: str | None


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
        given = ((name, getattr(self, name)) for name in Filters.__annotations__)
        return {name: _shown(name, value) for name, value in given if value is not None}


def check_error(pattern: object) -> str:
    """Check a pattern of error texts."""
    if not isinstance(pattern, str) or not pattern.strip("*"):
        raise InvalidInputError(
            f"error={shown(pattern)}: name a part of the text, as '*timeout*'", "error"
        )
    if len(pattern) > MAX_ERROR_PATTERN:
        raise InvalidInputError(
            f"error: a pattern has at most {MAX_ERROR_PATTERN} characters", "error"
        )
    if "\0" in pattern:
        raise InvalidInputError("error: no stored text contains the character NUL", "error")
    return pattern


def check_statuses(status: object) -> frozenset[Status]:
    """Convert one status or several."""
    if isinstance(status, (str, int)) or not isinstance(status, Iterable):
        return frozenset({check_status(status)})
    statuses = frozenset(map(check_status, status))
    if not statuses:
        names = ", ".join(status.name for status in Status)
        raise InvalidInputError(f"status is empty: name some of {names}, or leave it out", "status")
    return statuses


def check_ids(ids: object) -> frozenset[int]:
    """Convert one id or several."""
    if isinstance(ids, (str, bytes, int, Mapping)) or not isinstance(ids, Iterable):
        return frozenset({check_id(ids, "ids")})
    checked = set[int]()
    for each in ids:
        checked.add(check_id(each, "ids"))
        if len(checked) > MAX_IDS:
            raise InvalidInputError(f"ids: name at most {MAX_IDS:,} tasks in one call", "ids")
    if not checked:
        raise InvalidInputError("ids is empty: name some tasks, or leave it out", "ids")
    return frozenset(checked)


#: The checks of filters that are not instants.
_CHECKS: dict[str, Callable[[object], Any]] = {
    "tag": check_tag,
    "ids": check_ids,
    "key": check_key,
    "key_prefix": lambda prefix: check_key(prefix, "key_prefix"),
    "status": check_statuses,
    "queue": check_queue,
    "error": check_error,
    "meta": lambda meta: tuple(check_meta(meta).items()) or None,
}


def filter_of(filters: Mapping[str, Any]) -> Filter:
    """Check the filters; None means that a filter is not given."""
    unknown = filters.keys() - Filters.__annotations__.keys()
    if unknown:
        known = ", ".join(Filters.__annotations__)
        raise InvalidInputError(
            f"{', '.join(sorted(unknown))}: tasks are not named by that (known: {known})",
            min(unknown),
        )
    return Filter(
        **{
            name: _CHECKS.get(name, partial(check_instant, argument=name))(value)
            for name, value in filters.items()
            if value is not None
        }
    )


def _shown(name: str, value: Any) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if name == "ids":
        return [str(id) for id in sorted(value)]  # JSON numbers of JavaScript are too short for ids
    if isinstance(value, frozenset):
        names = sorted(status.name for status in value)
        return names[0] if len(names) == 1 else names
    return dict(value) if isinstance(value, tuple) else value


# -- Bulk operations: the filter, the result and the log entry ------------------------------------


class BulkOptions(Filters, total=False):
    """The filters and options of a bulk operation; `Bulk.cancel` explains them."""

    everything: bool
    dry_run: bool
    actor: str | None
    on_progress: OnProgress | None


@dataclass(frozen=True, slots=True)
class BulkFilter:
    """The tasks that one bulk operation moves."""

    move: str
    where: Filter

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
        return LIVE if _moves_live(self.move) else frozenset({Status.FAILED})


def bulk_filter_of(move: str, filters: Mapping[str, Any], everything: bool) -> BulkFilter:
    """Check the filters; raise `InvalidInputError` without any, unless `everything` is True."""
    where = filter_of(filters)
    if where == Filter() and not everything:
        raise InvalidInputError(
            f"{move}: name the tasks (by tag=, key_prefix=, …), or say everything=True",
            "everything",
        )
    allowed = MOVES[move].sources | (LIVE if _moves_live(move) else frozenset())
    if wrong := (where.status or frozenset()) - allowed:
        names = ", ".join(sorted(each.name for each in MOVES[move].sources))
        raise InvalidInputError(
            f"{move} is for tasks that are {names}, not {', '.join(sorted(s.name for s in wrong))}",
            "status",
        )
    return BulkFilter(move, where)


def _moves_live(move: str) -> bool:
    return MOVES[move].sources <= LIVE


@dataclass(frozen=True, slots=True)
class BulkResult:
    """The counts of a bulk operation, so far or at its end.

    Attributes
    ----------
    matched
        The number of tasks that matched the filter at the start.
    changed
        The number of tasks that were changed.
    refused
        The number of tasks that were left as they were. They run, changed in the meantime, are
        locked by another transaction, or another task has their key.
    started
        The start of the operation, by the clock of the database.
    runs
        The ids of the log entries. Empty after a dry run.

    Examples
    --------
    >>> result = delays.bulk.cancel(tag="mail.send")
    >>> result.changed, result.refused
    (1200, 3)
    """

    matched: int
    changed: int
    refused: int
    started: datetime
    runs: tuple[int, ...] = ()


#: Is called with the counts so far.
OnProgress = Callable[[BulkResult], object]


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
        shown = {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in asdict(self).items()
        }
        return {**shown, "id": str(self.id)}


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
