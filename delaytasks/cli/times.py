"""Instants, as people type them and as tables show them, and the options that take a time."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import click

from delaytasks.core.clock import UTC
from delaytasks.core.durations import parse_duration, show_duration
from delaytasks.core.errors import InvalidDelayError, InvalidScheduleError, NaiveDatetimeError


def parse_instant(text: str) -> datetime:
    """An ISO 8601 instant with its time zone."""
    # Python 3.10 does not know Z.
    typed = re.sub(r"[zZ]$", "+00:00", text.strip())
    try:
        instant = datetime.fromisoformat(typed)
    except ValueError:
        raise InvalidScheduleError(
            f"{text!r:.40} is not an instant; write it as 2030-01-31T18:00:00Z or 2030-01-31T18:00:00+02:00"
        ) from None
    if instant.tzinfo is None:
        raise NaiveDatetimeError(
            f"{text!r:.40} has no time zone; end it with Z for UTC, or with an offset (2030-01-31T18:00:00+02:00)"
        )
    return instant


def show_from_now(instant: datetime, now: datetime) -> str:
    """in 1h30m, or 5s ago."""
    seconds = (instant - now).total_seconds()
    return f"in {show_duration(seconds)}" if seconds > 0 else f"{show_duration(seconds)} ago"


def show_instant(instant: datetime) -> str:
    """UTC to the second, in the form that `parse_instant` reads."""
    return instant.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def to_duration(
    _ctx: click.Context, _option: click.Parameter, typed: str | None
) -> timedelta | None:
    """An option's callback: unlike a type's, its error keeps its own class."""
    return None if typed is None else parse_duration(typed)


def to_instant(_ctx: click.Context, _option: click.Parameter, typed: str | None) -> datetime | None:
    return None if typed is None else parse_instant(typed)


def to_past(ctx: click.Context, _option: click.Parameter, typed: str | None) -> datetime | None:
    """An instant, or a duration that counts back from now."""
    if typed is None:
        return None
    try:
        ago = parse_duration(typed)
    except InvalidDelayError:
        try:
            return parse_instant(typed)
        except InvalidScheduleError as error:
            raise InvalidScheduleError(f"{error}; or as 1h, which means an hour ago") from None
    from delaytasks.cli.context import cli_of

    try:
        return cli_of(ctx).delays.clock.now() - ago
    except OverflowError:
        raise InvalidScheduleError(
            f"{typed!r:.40} ago is before the first year that there is"
        ) from None


def to_shift(_ctx: click.Context, _option: click.Parameter, typed: str | None) -> timedelta | None:
    """A duration, or one with a minus sign."""
    if typed is None:
        return None
    return (
        -parse_duration(typed.strip()[1:])
        if typed.strip().startswith("-")
        else parse_duration(typed)
    )


delay_option = click.option(
    "--delay",
    callback=to_duration,
    metavar="DURATION",
    help="From now: 90 (seconds), 30m, 1h30m, 2d, 500ms.",
)
at_option = click.option(
    "--at",
    "when",
    callback=to_instant,
    metavar="INSTANT",
    help="As 2030-01-31T18:00:00Z. The past means now.",
)
