"""Validate the arguments of callers: tags, keys, queues, delays and instants."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Any

from delaytasks.core.clock import UTC
from delaytasks.core.durations import has_unit, parse_duration
from delaytasks.core.errors import (
    BodyNotStorableError,
    InvalidDelayError,
    InvalidInputError,
    InvalidKeyError,
    InvalidPriorityError,
    InvalidQueryError,
    InvalidQueueError,
    InvalidScheduleError,
    InvalidTagError,
    NaiveDatetimeError,
)
from delaytasks.core.model_instances import key_remedy
from delaytasks.core.number_checks import is_integer
from delaytasks.core.states import Status
from delaytasks.core.text import shown

TAG_LENGTH = 128
KEY_LENGTH = 191
CONCURRENCY_KEY_LENGTH = 255
QUEUE_LENGTH = 100
ACTOR_LENGTH = 255
#: The key of an occurrence is the name of its schedule and a time of 25 characters.
SCHEDULE_NAME_LENGTH = KEY_LENGTH - 25
PAGE_MAX = 1000
MAX_PRIORITY = 9
_QUEUE = re.compile(r"[A-Za-z0-9_.-]+")


def check_tag(tag: object) -> str:
    return _check_name(tag, "tag", TAG_LENGTH, InvalidTagError)


def check_key(key: object) -> str:
    return _check_name(key, "key", KEY_LENGTH, InvalidKeyError)


def check_concurrency_key(key: object) -> str:
    return _check_name(key, "concurrency_key", CONCURRENCY_KEY_LENGTH, InvalidKeyError)


def check_schedule_name(name: object) -> str:
    return _check_name(name, "name of a schedule", SCHEDULE_NAME_LENGTH, InvalidScheduleError)


def check_actor(actor: object) -> str:
    return _check_name(actor, "actor", ACTOR_LENGTH, InvalidQueryError)


def check_status(status: object) -> Status:
    """Convert the name or the number of a status."""
    try:
        if isinstance(status, str):
            return Status[status.upper()]
        if isinstance(status, int) and not isinstance(status, bool):
            return Status(status)
    except (KeyError, ValueError):
        pass
    raise InvalidQueryError(
        f"status is one of {', '.join(s.name for s in Status)}, not {shown(status)}"
    )


def check_page_limit(limit: object) -> int:
    if not is_integer(limit, 1, PAGE_MAX):
        raise InvalidQueryError(f"limit is an integer from 1 to {PAGE_MAX}, not {shown(limit)}")
    return limit


def check_queue(queue: object) -> str:
    """Check a queue name. RabbitMQ limits its length, and the file transport uses it in paths."""
    name = _check_name(queue, "queue", QUEUE_LENGTH, InvalidQueueError)
    if not is_queue(name):
        raise InvalidQueueError(
            f"a queue has letters, digits, '_', '.' and '-' only, not {shown(name)}"
        )
    return name


def _check_name(value: object, what: str, longest: int, error: type[InvalidInputError]) -> str:
    if not isinstance(value, str):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        remedy = f": write str({shown(value)})" if is_number else key_remedy(value)
        raise error(f"a {what} is a string, not {type(value).__name__}{remedy}")
    if not value.strip():
        raise error(f"a {what} must not be empty or blank")
    if value != value.strip():  # MySQL treats 'a' and 'a ' as equal
        raise error(f"a {what} must not begin or end with a blank: {shown(value)}")
    if len(value) > longest:
        raise error(
            f"a {what} has at most {longest} characters, this one has {len(value)}: {value[:40]!r}…"
        )
    if value.isprintable():
        return str.__str__(value)  # a str itself, because drivers write an enum by its own rules
    if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise BodyNotStorableError(
            f"the {what} {shown(value)} contains NUL or a lone surrogate, which cannot be stored"
        )
    raise error(f"the {what} {shown(value)} contains control or unprintable characters")


#: The queue name of workers that serve all queues.
ALL_QUEUES = "*"


def is_queue(name: str) -> bool:
    return bool(_QUEUE.fullmatch(name))


def check_priority(priority: object) -> int:
    if not is_integer(priority, 0, MAX_PRIORITY):
        raise InvalidPriorityError(
            f"a priority is an integer from 0 to {MAX_PRIORITY} (higher first), "
            f"not {shown(priority)}"
        )
    return int(priority)


def check_delay(delay: object, max_delay_s: float, what: str = "a delay") -> timedelta:
    """Convert seconds, a text such as "1h30m" or a timedelta to a timedelta up to `max_delay_s`."""
    if isinstance(delay, str) and has_unit(delay):
        delay = parse_duration(delay)
    if isinstance(delay, timedelta):
        seconds = delay.total_seconds()
    elif isinstance(delay, int) and not isinstance(delay, bool):
        seconds = min(max(delay, -1), 2**53)  # an integer may be too large for a float
    elif isinstance(delay, float):
        seconds = delay
    else:
        is_instant = isinstance(delay, datetime)
        remedy = "; pass an instant to schedule_at, or as at=" if is_instant else ""
        raise InvalidDelayError(
            f"{what} is a number of seconds, a text with units such as '30m', or a timedelta, "
            f"not {type(delay).__name__} ({shown(delay)}){remedy}"
        )
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidDelayError(f"{what} is finite and not negative, not {shown(delay)}")
    if seconds > max_delay_s:
        raise InvalidDelayError(
            f"{what} is at most {max_delay_s:g} s (setting max_delay_s), not {shown(delay)}"
        )
    return timedelta(seconds=seconds)


def check_shift(shift: Any, max_s: float) -> timedelta:
    """Convert a delay to a timedelta that is not 0; it may be negative."""
    if isinstance(shift, str):
        is_negative, size = shift.lstrip().startswith("-"), shift.strip().removeprefix("-")
    else:
        zero: Any = timedelta() if isinstance(shift, timedelta) else 0
        is_negative = isinstance(shift, (timedelta, int, float)) and shift < zero
        size = -shift if is_negative else shift
    checked = check_delay(size, max_s, "a shift")
    if not checked:
        raise InvalidDelayError("a shift is not 0")
    return -checked if is_negative else checked


def check_period(spread: object, max_s: float, what: str = "spread") -> timedelta:
    """Convert a period to a timedelta that is not 0. A text without a unit means seconds."""
    checked = timedelta(seconds=check_wait(spread, max_s, what))
    if not checked:
        raise InvalidDelayError(f"{what} is more than 0")
    return checked


def check_wait(wait: object, max_s: float, what: str = "a delay") -> float:
    """Convert an option that is a delay to seconds. A text without a unit means seconds."""
    delay = parse_duration(wait) if isinstance(wait, str) else wait
    return check_delay(delay, max_s, what).total_seconds()


def check_due(delay: object, at: object) -> None:
    """Check that either a delay or an instant is given."""
    if (delay is None) == (at is None):
        raise InvalidScheduleError("give a delay or an instant (at), one of the two")


def check_instant(at: object) -> datetime:
    """Convert an aware datetime to UTC. An instant in the past is valid and means now."""
    if not isinstance(at, datetime):
        raise InvalidScheduleError(
            f"an instant is an aware datetime, not {type(at).__name__} ({shown(at)})"
        )
    if at.tzinfo is None or at.utcoffset() is None:
        raise NaiveDatetimeError(
            f"{at.isoformat()} has no time zone; use datetime.now(timezone.utc) or an aware one"
        )
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise InvalidScheduleError(f"{at.isoformat()} cannot be converted to UTC") from None
