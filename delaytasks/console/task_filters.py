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
from delaytasks.core.errors import InvalidDelayError, InvalidQueryError, SearchTimeoutError
from delaytasks.core.filters import check_error
from delaytasks.core.page import Page
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask

TASKS_PER_PAGE = 50
#: Pages of 200 tasks that one request searches for an error text.
SEARCHED_PAGES, SEARCHED_SIZE = 5, 200
_TEXTS = ("tag", "key", "key_prefix", "queue")
_INSTANT_FILTERS = ("since", "until", "created_since", "created_until")


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
    statuses = [each for each in given.getlist("status") if each]
    if statuses:
        typed["status"] = statuses
        filters["status"] = statuses
    if "error" in typed:
        error_filter(typed["error"])  # raises the error of a wrong pattern
    if "meta" in typed:
        filters["meta"] = _meta_of(typed["meta"])
    is_oldest_first = given.get("order") == "oldest"
    if is_oldest_first:
        typed["order"] = "oldest"
    cursor = given.get("cursor") or None
    return TaskQuery(filters, typed.get("error", ""), cursor, is_oldest_first, typed)


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


def error_filter(text: str) -> str:
    """Return the filter `error` of `find` for what a viewer has typed: a part, or a pattern."""
    return check_error(text if "*" in text else f"*{text}*")


def error_matcher(text: str) -> Callable[[str], bool]:
    """Return a function that tells whether an error text matches, as the filter of `find` does."""
    # Not a regular expression, which takes minutes for some patterns and stops all other threads.
    first, *middle, last = error_filter(text).lower().split("*")

    def matches(error: str) -> bool:
        error = error.lower()
        if not error.startswith(first):
            return False
        at = len(first)
        for part in middle:
            found = error.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        return len(error) - len(last) >= at and error.endswith(last)

    return matches


def _meta_of(text: str) -> dict[str, str]:
    pairs = {}
    for each in text.split(","):
        name, sign, value = each.partition("=")
        if not sign:
            raise InvalidQueryError(f"{each!r:.40} is not a pair: write name=value")
        pairs[name.strip()] = value.strip()
    return pairs


def read_page(delays: DelayTasks, query: TaskQuery) -> tuple[Page, int]:
    """Return a page of tasks, and how many tasks were searched for the error text.

    An error text has no index. A bounded number of tasks is searched, and the next page continues
    there.
    """
    newest_first, searches = not query.is_oldest_first, Searches(delays)
    if not query.error:
        return searches.find(query.filters, query.cursor, TASKS_PER_PAGE, newest_first), 0
    filters: dict[str, Any] = {"status": [Status.FAILED], **query.filters}
    found: list[DelayTask] = []
    searched, cursor, matches = 0, query.cursor, error_matcher(query.error)
    for _ in range(SEARCHED_PAGES):
        try:
            page = searches.find(filters, cursor, SEARCHED_SIZE, newest_first)
        except SearchTimeoutError:
            if not searched:
                raise
            break  # the viewer continues at the cursor
        searched, cursor = searched + len(page), page.cursor
        found += (task for task in page if matches(task.error or ""))
        if cursor is None or len(found) >= TASKS_PER_PAGE:
            break
    return Page(found, cursor, page.missing), searched
