"""The sentences of a verdict, and the words that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import Literal, NamedTuple

from delaytasks.core.inputs import show_duration

Severity = Literal["good", "note", "warning", "bad"]
SEVERITIES: Sequence[Severity] = ("good", "note", "warning", "bad")


class Problem(NamedTuple):
    """One sentence, and the page of the console that shows more."""

    level: Severity
    text: str
    #: The overview has more below the sentences.
    page: str = "overview"
    #: The parameters of the page.
    parameters: Mapping[str, str] = {}


def clock_time(at: datetime, now: datetime, zone: tzinfo) -> str:
    """Return a time of day, with the date unless it is today."""
    local = at.astimezone(zone)
    is_today = local.date() == now.astimezone(zone).date()
    return f"{local:%H:%M %Z}" if is_today else f"{local:%b %d, %H:%M %Z}"


def since_text(seconds: float, now: datetime, zone: tzinfo) -> str:
    """Return when something began, for example "since 14:02 UTC (3m)"."""
    at = clock_time(now - timedelta(seconds=seconds), now, zone)
    return f"since {at} ({show_duration(seconds)})"


def tasks_are(number: int) -> str:
    """Return, for example, "1 task is" or "1,200 tasks are"."""
    return "1 task is" if number == 1 else f"{number:,} tasks are"


def runs_have(number: int, tag: str | None = None) -> str:
    """Return, for example, "1 run of mail.send has" or "12 runs have"."""
    of = "" if tag is None else f" of {tag}"
    return f"1 run{of} has" if number == 1 else f"{number:,} runs{of} have"
