"""Searches for tasks, which end after some seconds, whatever a viewer has typed."""

from __future__ import annotations

from typing import Any, cast

from delaytasks.client import DelayTasks
from delaytasks.core.clock import monotonic
from delaytasks.core.filters import Filters
from delaytasks.core.page import Page
from delaytasks.operations.tasks import find_tasks
from delaytasks.runtime import runtime_of

#: Seconds after which a search ends.
SEARCH_S = 5.0
#: The least limit of a search that continues an earlier one.
LEAST_SEARCH_S = 0.1


class Searches:
    """Reads pages of tasks. All pages together end after `SEARCH_S` seconds."""

    def __init__(self, delays: DelayTasks) -> None:
        self._runtime = runtime_of(delays)
        self._began = monotonic()

    def find(
        self, *, limit: int, cursor: str | None = None, newest_first: bool = False, **filters: Any
    ) -> Page:
        """Return a page like `DelayTasks.find`, or raise `SearchTimeoutError`."""
        left_s = max(SEARCH_S - (monotonic() - self._began), LEAST_SEARCH_S)
        return find_tasks(
            self._runtime, cast("Filters", filters), cursor, limit, newest_first, None, left_s
        )
