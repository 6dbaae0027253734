"""What people read and type on pages and in commands: durations, instants and errors."""

from __future__ import annotations

from datetime import datetime, tzinfo

from delaytasks.model.clock import UTC
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import parse_duration, parse_instant, show_duration
from delaytasks.model.text import one_line


def show_instant(instant: datetime) -> str:
    """Return the instant in UTC to the second, in the form that `parse_instant` reads."""
    return instant.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def show_from_now(instant: datetime, now: datetime) -> str:
    """Return, for example, "in 1h30m", "now" or "5s ago"."""
    seconds = (instant - now).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {show_duration(seconds)}" if seconds > 0 else f"{show_duration(seconds)} ago"


def show_measured(seconds: float | None) -> str:
    """Return a measured duration, which may be short: "12ms", "1.5s", "1m30s"; "–" for None."""
    if seconds is None:
        return "–"
    if seconds < 0.001:
        return f"{seconds * 1000:.2g}ms" if seconds else "0"
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 10 else show_duration(seconds)


def show_offset(seconds: float) -> str:
    """Return how far a clock is ahead or behind: "+1.5s", "-1d"."""
    return f"{'-' if seconds < 0 else '+'}{show_measured(abs(seconds))}"


def parse_past(
    text: str, now: datetime, argument: str = "at", zone: tzinfo | None = None
) -> datetime:
    """Return an instant, which may be given as a duration that counts back from now."""
    try:
        return now - parse_duration(text)
    except OverflowError:
        raise InvalidInputError(f"{text!r:.40} ago is before the year 1", argument) from None
    except InvalidInputError:
        try:
            return parse_instant(text, argument, zone)
        except InvalidInputError as error:
            problem = f"{error}; or as 1h, which means an hour ago"
            raise InvalidInputError(problem, argument) from None


def last_line(error: str | None, longest: int = 200) -> str:
    """Return the line of a traceback that names the error: the first one after its frames."""
    lines = (error or "").strip().split("\n")
    last_frame = max((n for n, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    after = [line for line in lines[last_frame + 1 :] if line and not line.startswith(" ")]
    return one_line(after[0] if after else lines[-1], longest)
