"""Finds tasks by the text of their error. There is no index of errors, so that one call searches a
bounded number of tasks, and the next page continues there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from delaytasks.core.errors import SearchTimeoutError
from delaytasks.core.filters import check_error
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, Page

#: Pages of 200 tasks that one call searches for an error text.
SEARCHED_PAGES, SEARCHED_SIZE = 5, 200


def find_by_error(
    find: Callable[..., Page],
    filters: Mapping[str, Any],
    text: str,
    cursor: str | None,
    newest_first: bool,
    enough: int,
) -> tuple[Page, int]:
    """Return a page of tasks whose error contains `text`, and how many tasks were searched.

    Parameters
    ----------
    find
        `DelayTasks.find`.
    filters
        Its filters. Without a status, FAILED tasks are searched.
    text
        A part of the error text, or a pattern in which `*` stands for any text.
    cursor, newest_first
        See `DelayTasks.find`.
    enough
        The number of tasks at which the search ends.
    """
    filters = {"status": [Status.FAILED], **filters}
    found: list[DelayTask] = []
    searched, matches = 0, error_matcher(text)
    for _ in range(SEARCHED_PAGES):
        try:
            page = find(**filters, cursor=cursor, limit=SEARCHED_SIZE, newest_first=newest_first)
        except SearchTimeoutError:
            if not searched:
                raise
            break  # the next page continues at the cursor
        searched, cursor = searched + len(page), page.cursor
        found += (task for task in page if matches(task.error or ""))
        if cursor is None or len(found) >= enough:
            break
    return Page(found, cursor), searched


def error_filter(text: str) -> str:
    """Return the filter `error` of `find` for a text that a person typed: a part, or a pattern."""
    return check_error(text if "*" in text else f"*{text}*")


def error_matcher(text: str) -> Callable[[str], bool]:
    """Return a function that compares an error text with the pattern, as `find` does."""
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
