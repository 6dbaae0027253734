"""The filters of `find` and of the bulk functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import check_instant, check_key, check_queue, check_status, check_tag
from delaytasks.core.meta import check_meta
from delaytasks.core.states import Status
from delaytasks.core.text import shown

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
        raise InvalidQueryError(f"error={shown(pattern)}: name a part of the text, as '*timeout*'")
    if len(pattern) > MAX_ERROR_PATTERN:
        raise InvalidQueryError(f"error: a pattern has at most {MAX_ERROR_PATTERN} characters")
    if "\0" in pattern:
        raise InvalidQueryError("error: no stored text contains the character NUL")
    return pattern


def check_statuses(status: object) -> frozenset[Status]:
    """Convert one status or several."""
    if isinstance(status, (str, int)) or not isinstance(status, Iterable):
        return frozenset({check_status(status)})
    statuses = frozenset(map(check_status, status))
    if not statuses:
        names = ", ".join(status.name for status in Status)
        raise InvalidQueryError(f"status is empty: name some of {names}, or leave it out")
    return statuses


def check_ids(ids: object) -> frozenset[int]:
    """Convert one id or several."""
    if isinstance(ids, (str, bytes, int, Mapping)) or not isinstance(ids, Iterable):
        return frozenset({check_id(ids)})
    checked = set[int]()
    for each in ids:
        checked.add(check_id(each))
        if len(checked) > MAX_IDS:
            raise InvalidQueryError(f"ids: name at most {MAX_IDS:,} tasks in one call")
    if not checked:
        raise InvalidQueryError("ids is empty: name some tasks, or leave it out")
    return frozenset(checked)


#: The checks of filters that are not instants.
_CHECKS: dict[str, Callable[[object], Any]] = {
    "tag": check_tag,
    "ids": check_ids,
    "key": check_key,
    "key_prefix": check_key,
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
        raise InvalidQueryError(
            f"{', '.join(sorted(unknown))}: tasks are not named by that (known: {known})"
        )
    return Filter(
        **{
            name: _CHECKS.get(name, check_instant)(value)
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
