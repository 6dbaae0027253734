"""The filters of the page of tasks, as they are in its address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any

from werkzeug.datastructures import MultiDict

from delaytasks.client import DelayTasks
from delaytasks.console.searches import Searches
from delaytasks.core.clock import UTC
from delaytasks.core.durations import parse_duration
from delaytasks.core.errors import InvalidDelayError, InvalidQueryError
from delaytasks.core.filters import check_ids
from delaytasks.core.page import Page
from delaytasks.operations.error_search import error_filter, find_by_error

TASKS_PER_PAGE = 50
_TEXTS = ("tag", "key", "key_prefix", "queue")
_INSTANT_FILTERS = ("since", "until", "created_since", "created_until")
#: Raise the error of a wrong pattern, or of a wrong id.
_TYPED_CHECKS: dict[str, Callable[[Any], object]] = {"error": error_filter, "ids": check_ids}


@dataclass(frozen=True)
class TaskQuery:
    """The filters of `find`, and what the console adds to them."""

    filters: dict[str, Any]
    #: A part of the error text, or a pattern in which `*` stands for any text.
    error: str
    cursor: str | None
    is_oldest_first: bool
    #: The values as they were typed, for the form and the addresses of other pages.
    typed: dict[str, Any]

    @property
    def has_filters(self) -> bool:
        return bool(self.filters or self.error)


def query_of(given: MultiDict[str, str], now: datetime, zone: tzinfo) -> TaskQuery:
    """Read the filters; raise an `InvalidInputError` if one is wrong."""
    typed: dict[str, Any] = {}
    filters: dict[str, Any] = {}
    for name in (*_TEXTS, *_INSTANT_FILTERS, "meta", "error"):
        # Browsers send the line ends of a pattern as CR LF.
        if text := given.get(name, "").replace("\r\n", "\n").strip():
            typed[name] = text
    filters.update((name, typed[name]) for name in _TEXTS if name in typed)
    for name in _INSTANT_FILTERS:
        if name in typed:
            filters[name] = instant_of(typed[name], now, zone)
    typed |= _lists(given)
    filters |= _lists(given)
    for name, check in _TYPED_CHECKS.items():
        if name in typed:
            check(typed[name])
    if "meta" in typed:
        filters["meta"] = _meta_of(typed["meta"])
    is_oldest_first = given.get("order") == "oldest"
    if is_oldest_first:
        typed["order"] = "oldest"
    cursor = given.get("cursor") or None
    return TaskQuery(filters, typed.get("error", ""), cursor, is_oldest_first, typed)


def _lists(given: MultiDict[str, str]) -> dict[str, list[str]]:
    """Return the filters that may have several values."""
    found = {name: list(filter(None, given.getlist(name))) for name in ("status", "ids")}
    return {name: values for name, values in found.items() if values}


def number_of(text: str) -> int | None:
    """Return the number that a request contains, or None if it is none or a far too large one."""
    # `int` refuses some texts that `isdigit` accepts, such as a superscript, and very long ones.
    is_number = text.isascii() and text.isdigit() and len(text) <= 20
    return int(text) if is_number else None


def instant_of(text: str, now: datetime, zone: tzinfo) -> datetime:
    """Return the instant of `2026-11-25T03:00`, in `zone` unless it has one, or of `1h` ago."""
    try:
        return now - parse_duration(text)
    except (InvalidDelayError, OverflowError):
        pass
    try:
        instant = datetime.fromisoformat(text.replace("Z", "+00:00").replace("z", "+00:00"))
    except ValueError:
        raise InvalidQueryError(
            f"{text!r:.40} is not a time: write 2026-11-25T03:00, or 1h for an hour ago"
        ) from None
    return (instant if instant.tzinfo else instant.replace(tzinfo=zone)).astimezone(UTC)


def _meta_of(text: str) -> dict[str, str]:
    pairs = {}
    for each in text.split(","):
        name, sign, value = each.partition("=")
        if not sign:
            raise InvalidQueryError(f"{each!r:.40} is not a pair: write name=value")
        pairs[name.strip()] = value.strip()
    return pairs


def read_page(delays: DelayTasks, query: TaskQuery) -> tuple[Page, int]:
    """Return a page of tasks, and how many tasks were searched for the error text."""
    newest_first, searches = not query.is_oldest_first, Searches(delays)
    if not query.error:
        page = searches.find(
            **query.filters, cursor=query.cursor, limit=TASKS_PER_PAGE, newest_first=newest_first
        )
        return page, 0
    return find_by_error(
        searches.find, query.filters, query.error, query.cursor, newest_first, TASKS_PER_PAGE
    )
