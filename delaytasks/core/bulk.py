"""Many tasks moved at once: which ones, what became of them, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypedDict

from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.inputs import check_instant, check_key, check_queue, check_status, check_tag
from delaytasks.core.states import LIVE, MOVES, Status

#: All others are instants.
_CHECKS: dict[str, Callable[[object], Any]] = {
    "tag": check_tag,
    "key_prefix": check_key,
    "status": check_status,
    "queue": check_queue,
}


class Filters(TypedDict, total=False):
    """What tasks have in common. Each of them narrows; times are from `since` on and before `until`."""

    tag: str | None
    key_prefix: str | None
    status: Status | str | None
    queue: str | None
    #: When they are due.
    since: datetime | None
    until: datetime | None
    #: When they were scheduled.
    created_since: datetime | None
    created_until: datetime | None
    #: When they last moved.
    updated_until: datetime | None


@dataclass(frozen=True, slots=True)
class Filter:
    """`Filters`, checked, for one move."""

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
        """A task that runs is met, and refused. What was cancelled runs again only if that is asked for."""
        if self.status is not None:
            return frozenset({self.status})
        return LIVE if _moves_live(self.move) else frozenset({Status.FAILED})

    def as_json(self) -> dict[str, Any]:
        """What was named."""
        named = {
            name: value
            for name, value in asdict(self).items()
            if name != "move" and value is not None
        }
        shown = {name: _shown(value) for name, value in named.items()}
        return shown or {"everything": True}


def filter_of(move: str, filters: Mapping[str, Any], everything: bool) -> Filter:
    """`InvalidQueryError` when it names nothing, and nobody said that everything is meant."""
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
    """What became of many tasks: so far, or at the end."""

    #: Those that the filter named when it began.
    matched: int
    changed: int
    #: They run, had moved on when their turn came, are locked by somebody, or another task has their key.
    refused: int
    #: By the database's clock.
    started: datetime
    #: Ids of the rows in the audit table, one for each database; none for a dry run.
    runs: tuple[int, ...] = ()
    #: The shards that could not be reached, or not until the end.
    missing: tuple[int, ...] = ()


#: Is called with the counts so far.
OnProgress = Callable[[BulkResult], object]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A bulk operation, as its database remembers it."""

    id: int
    action: str
    filter: dict[str, Any]
    actor: str
    #: "running", "done", "stopped" or "failed"; one that died says "running", and is seen no more.
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
