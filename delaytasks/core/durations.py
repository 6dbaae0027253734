"""Durations as users type them: 90, 1h30m, 2d, 500ms."""

from __future__ import annotations

import re
from datetime import timedelta

from delaytasks.core.errors import InvalidDelayError

#: Seconds, a text that `parse_duration` reads, or a timedelta.
Delay = float | str | timedelta

_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DECIMAL = r"[0-9]+(?:\.[0-9]+)?"
#: Each unit at most once, the largest first, because "30m1h" is usually a mistake.
_PARTS = re.compile(
    r"\s*".join(rf"(?:({_DECIMAL})\s*{unit}(?![a-z]))?" for unit in _UNITS), re.ASCII
)
_RULE = "write seconds (90, 0.5), or w, d, h, m, s, ms with the largest first (1h30m, 2d, 500ms)"


def parse_duration(text: str) -> timedelta:
    """Convert a text such as "90", "1h30m", "2d" or "500ms" to a timedelta.

    Raises
    ------
    InvalidDelayError
        If the text is not a duration, is negative or is too long.
    """
    typed = text.strip().lower()
    if typed.startswith("-"):
        raise InvalidDelayError(f"a delay is not negative, as {text!r:.40} is; {_RULE}")
    if re.fullmatch(_DECIMAL, typed, re.ASCII):
        seconds = float(typed)
    else:
        match = _PARTS.fullmatch(typed)
        if match is None or not any(match.groups()):
            raise InvalidDelayError(f"{text!r:.40} is not a delay; {_RULE}")
        counts = [float(count or 0) for count in match.groups()]
        seconds = sum(count * size for count, size in zip(counts, _UNITS.values(), strict=True))
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidDelayError(f"{text!r:.40} is longer than a delay can be; {_RULE}") from None


def has_unit(text: str) -> bool:
    """Return whether a text is more than a number. `"5"` is usually an unconverted input."""
    return not re.fullmatch(r"[-+0-9.eE_\s]*", text)


def show_duration(seconds: float) -> str:
    """Return the two largest units, in the form that `parse_duration` reads: 1h30m, 2d, 5s."""
    left = round(abs(seconds))
    if left == 0:
        return f"{round(abs(seconds) * 1000)}ms" if seconds else "0s"
    shown: list[str] = []
    for unit, size in _UNITS.items():
        if unit == "ms" or len(shown) == 2:
            break
        count, left = divmod(left, int(size))
        if count:
            shown.append(f"{count}{unit}")
        elif shown:
            break
    return "".join(shown)


def show_timing(timing: str) -> str:
    """Return the timing of a recurring schedule for readers: "every 5m" instead of "every 300"."""
    kind, _, seconds = timing.partition(" ")
    is_interval = kind == "every" and seconds.isascii() and seconds.isdigit()
    return f"every {show_duration(int(seconds))}" if is_interval else timing


def show_measured(seconds: float | None) -> str:
    """Return a measured duration, which may be short: "12ms", "1.5s", "1m30s"; "–" for None."""
    if seconds is None:
        return "–"
    if seconds < 0.001:
        return f"{seconds * 1000:.2g}ms" if seconds else "0"
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 10 else show_duration(seconds)
