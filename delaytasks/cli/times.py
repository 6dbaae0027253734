"""Instants, durations and pairs of meta, as people type them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import click

from delaytasks.core.clock import UTC
from delaytasks.core.errors import (
    InvalidDelayError,
    InvalidMetaError,
    InvalidScheduleError,
    NaiveDatetimeError,
)
from delaytasks.core.inputs import parse_duration, show_duration


def parse_instant(text: str) -> datetime:
    """Return the instant of an ISO 8601 text with a time zone."""
    # Python 3.10 does not know Z.
    typed = re.sub(r"[zZ]$", "+00:00", text.strip())
    try:
        instant = datetime.fromisoformat(typed)
    except ValueError:
        raise InvalidScheduleError(
            f"{text!r:.40} is not an instant; "
            "write it as 2030-01-31T18:00:00Z or 2030-01-31T18:00:00+02:00"
        ) from None
    if instant.tzinfo is None:
        raise NaiveDatetimeError(
            f"{text!r:.40} has no time zone; "
            "end it with Z for UTC, or with an offset (2030-01-31T18:00:00+02:00)"
        )
    return instant


def parse_shift(text: str) -> timedelta:
    """Return a duration, which is negative if it begins with a minus sign."""
    typed = text.strip()
    return -parse_duration(typed[1:]) if typed.startswith("-") else parse_duration(typed)


def parse_days(text: str) -> timedelta:
    """Return a duration of whole days."""
    days = parse_duration(text)
    if not days or days % timedelta(days=1):
        raise click.UsageError(
            f"--every is a whole number of days, such as 1d or 7d, and not {text}"
        )
    return days


def show_from_now(instant: datetime, now: datetime) -> str:
    """Return, for example, "in 1h30m" or "5s ago"."""
    seconds = (instant - now).total_seconds()
    return f"in {show_duration(seconds)}" if seconds > 0 else f"{show_duration(seconds)} ago"


def show_instant(instant: datetime) -> str:
    """Return the instant in UTC to the second, in the form that `parse_instant` reads."""
    return instant.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in later versions
    """A type of option that one function parses, whose errors keep their own class."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._parse(value) if isinstance(value, str) else value


class Past(click.ParamType):  # type: ignore[type-arg]  # generic only in later versions
    """An instant, or a duration that counts back from now."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, datetime):
            return value
        try:
            ago = parse_duration(value)
        except InvalidDelayError:
            try:
                return parse_instant(value)
            except InvalidScheduleError as error:
                raise InvalidScheduleError(f"{error}; or as 1h, which means an hour ago") from None
        assert ctx is not None
        try:
            return ctx.obj.runtime.clock.now() - ago
        except OverflowError:
            raise InvalidScheduleError(f"{value!r:.40} ago is before the year 1") from None


DURATION = Parsed("duration", parse_duration)
SHIFT = Parsed("duration", parse_shift)
DAYS = Parsed("days", parse_days)
INSTANT = Parsed("instant", parse_instant)
PAST = Past()

delay_option = click.option(
    "--delay", type=DURATION, help="From now: 90 (seconds), 30m, 1h30m, 2d, 500ms."
)
at_option = click.option(
    "--at", type=INSTANT, help="As 2030-01-31T18:00:00Z. A time in the past means now."
)


class Pair(tuple[str, str]):
    """A pair that was typed."""

    __slots__ = ()


def parse_pair(text: str) -> Pair:
    name, sign, value = text.partition("=")
    if not sign:
        raise InvalidMetaError(f"{text!r:.40} is no pair: write it as name=value")
    return Pair((name, value))


def pairs_or(value: Any) -> Any:
    """Return pairs as a dict, an empty option as None, and any other value as it is."""
    if isinstance(value, tuple) and value and isinstance(value[0], Pair):
        return dict(value)
    return value or None


PAIR = Parsed("pair", parse_pair)
