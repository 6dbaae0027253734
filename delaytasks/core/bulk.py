"""Bulk operations: the filter, the result and the audit entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.filters import Filter, Filters, filter_of
from delaytasks.core.interfaces import To
from delaytasks.core.spread import Spread
from delaytasks.core.states import LIVE, MOVES, Status


class BulkOptions(Filters, total=False):
    """The filters and options of a bulk operation; `DelayTasks.cancel_many` explains them."""

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
    """Check the filters; raise `InvalidQueryError` without any, unless `everything` is True."""
    where = filter_of(filters)
    if where == Filter() and not everything:
        raise InvalidQueryError(
            f"{move}: name the tasks (by tag=, key_prefix=, …), or say everything=True"
        )
    allowed = MOVES[move].sources | (LIVE if _moves_live(move) else frozenset())
    if wrong := (where.status or frozenset()) - allowed:
        names = ", ".join(sorted(each.name for each in MOVES[move].sources))
        raise InvalidQueryError(
            f"{move} is for tasks that are {names}, not {', '.join(sorted(s.name for s in wrong))}"
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
        The ids of the audit entries. Empty after a dry run.

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
