"""Which tags were on time in the last hour, day and week, for the command line and the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delaytasks.core.errors import StoreError

if TYPE_CHECKING:
    from delaytasks.processors.registry import Registry
    from delaytasks.statistics.api import Statistics

#: The ranges that are shown.
WINDOWS = {"hour": "1h", "day": "1d", "week": "7d"}


def gather_on_time(statistics: Statistics, registry: Registry) -> list[dict[str, Any]]:
    """Return the on-time shares of the last hour, day and week by tag.

    The tags are those with `on_time` in this process, and those with counts in the last hour: most
    processes of an operator have no processors.
    """
    try:
        tags = {one.tag for one in statistics.on_time(since=WINDOWS["hour"])}
        tags |= {each.tag for each in registry if each.on_time_s is not None}
        return _of_tags(statistics, sorted(tags)) if tags else []
    except StoreError:
        return []  # the state of the deployment has the error


def _of_tags(statistics: Statistics, tags: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for window, since in WINDOWS.items():
        for one in statistics.on_time(since=since, tags=tags):
            about = {"tag": one.tag, "promised_s": one.promised_s, "target": one.target}
            empty = dict.fromkeys(WINDOWS)
            of_tag = found.setdefault(one.tag, {**about, **empty})
            numbers = one.as_json()
            of_tag[window] = {
                name: numbers[name] for name in ("on_time", "late", "share", "budget_left")
            }
    return [found[tag] for tag in sorted(found)]
