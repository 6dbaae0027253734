"""Bulk operations: the filter, the result and the audit entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypedDict

from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.inputs import check_instant, check_key, check_queue, check_status, check_tag
from delaytasks.core.states import LIVE, MOVES, Status

#: The checks of filters that are not instants.
_CHECKS: dict[str, Callable[[object], Any]] = {
    "tag": check_tag,
    "key_prefix": check_key,
    "status": check_status,
    "queue": check_queue,
}


class Filters(TypedDict, total=False):
    """Conditions that a task must all match. Times are at or after `since` and before `until`."""

    tag: str | None
    key_prefix: str | None
    status: Status | str | None
    queue: str | None
    #: The due time.
    since: datetime | None
    until: datetime | None
    #: The time of the call that scheduled the task.
    created_since: datetime | None
    created_until: datetime | None
    #: The time of the last change.
    updated_until: datetime | None


class BulkOptions(Filters, total=False):
    """The filters and options of a bulk operation; `DelayTasks.cancel_many` explains them."""

    everything: bool
    dry_run: bool
    actor: str | None
    on_progress: OnProgress | None


@dataclass(frozen=True, slots=True)
class Filter:
    """The checked `Filters` of one operation."""

    move: str
    tag: str | None = None
    key_prefix: str | None = None
    status: Status | None = None
    queue: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    created_since: datetime | None = None
    created_until: datetime | None = None
    updated_until: datetime | None = None

    @property
    def movable(self) -> frozenset[Status]:
        return self.looked_at & MOVES[self.move].sources

    @property
    def looked_at(self) -> frozenset[Status]:
        """The statuses of the tasks to find. A running task is found in order to be refused.

        A retry finds cancelled tasks only with `status="CANCELLED"`.
        """
        if self.status is not None:
            return frozenset({self.status})
        return LIVE if _moves_live(self.move) else frozenset({Status.FAILED})

    def as_json(self) -> dict[str, Any]:
        """Return the conditions that were given."""
        named = {
            name: value
            for name, value in asdict(self).items()
            if name != "move" and value is not None
        }
        shown = {name: _shown(value) for name, value in named.items()}
        return shown or {"everything": True}


def filter_of(move: str, filters: Mapping[str, Any], everything: bool) -> Filter:
    """Check the filters; raise `InvalidQueryError` without any, unless `everything` is True."""
    unknown = filters.keys() - Filters.__annotations__.keys()
    if unknown:
        known = ", ".join(Filters.__annotations__)
        raise InvalidQueryError(
            f"{', '.join(sorted(unknown))}: tasks are not named by that (known: {known})"
        )
    given = {
        name: _CHECKS.get(name, check_instant)(value)
        for name, value in filters.items()
        if value is not None
    }
    if not given and not everything:
        raise InvalidQueryError(
            f"{move}: name the tasks (by tag=, key_prefix=, …), or say everything=True"
        )
    status, allowed = (
        given.get("status"),
        MOVES[move].sources | (LIVE if _moves_live(move) else frozenset()),
    )
    if status is not None and status not in allowed:
        names = ", ".join(sorted(each.name for each in MOVES[move].sources))
        raise InvalidQueryError(f"{move} is for tasks that are {names}, not {status.name}")
    return Filter(move, **given)


def _moves_live(move: str) -> bool:
    return MOVES[move].sources <= LIVE


def _shown(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return value.name if isinstance(value, Status) else value


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
        The ids of the audit entries, one for each database. Empty after a dry run.
    missing
        The numbers of the shards that could not be reached, or became unreachable before the end.

    Examples
    --------
    >>> result = delays.cancel_many(tag="mail.send")
    >>> result.changed, result.refused
    (1200, 3)
    """

    matched: int
    changed: int
    refused: int
    started: datetime
    runs: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


#: Is called with the counts so far.
OnProgress = Callable[[BulkResult], object]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A bulk operation in the audit table of its database.

    Attributes
    ----------
    id
        The id of the entry.
    action
        `"cancel"`, `"reschedule"` or `"retry"`.
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
    shard
        The number of the database.

    Examples
    --------
    >>> [(entry.actor, entry.action, entry.changed) for entry in delays.audit()]
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
    shard: int = 0

    def as_json(self) -> dict[str, Any]:
        shown = {name: _shown(value) for name, value in asdict(self).items()}
        return {**shown, "id": str(self.id)}
