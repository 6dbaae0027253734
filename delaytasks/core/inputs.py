"""What callers hand in, checked before anything is written: tags, keys, delays, instants, bodies."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta
from typing import Any

from delaytasks.core.clock import UTC
from delaytasks.core.errors import (
    BodyNotJSONError,
    BodyNotStorableError,
    BodyTooLargeError,
    InvalidDelayError,
    InvalidInputError,
    InvalidKeyError,
    InvalidPriorityError,
    InvalidQueueError,
    InvalidScheduleError,
    InvalidTagError,
    NaiveDatetimeError,
)

TAG_LENGTH = 128
KEY_LENGTH = 191
QUEUE_LENGTH = 100
MAX_DEPTH = 100
MAX_PRIORITY = 9


def check_tag(tag: object) -> str:
    return _check_name(tag, "tag", TAG_LENGTH, InvalidTagError)


def check_key(key: object) -> str:
    return _check_name(key, "key", KEY_LENGTH, InvalidKeyError)


def check_queue(queue: object) -> str:
    return _check_name(queue, "queue", QUEUE_LENGTH, InvalidQueueError)


def _check_name(value: object, what: str, longest: int, error: type[InvalidInputError]) -> str:
    if not isinstance(value, str):
        raise error(f"a {what} is a string, not {type(value).__name__}")
    if not value.strip():
        raise error(f"a {what} must not be empty or blank")
    if len(value) > longest:
        raise error(f"a {what} has at most {longest} characters, this one has {len(value)}: {value[:40]!r}…")
    if value.isprintable():
        return value
    if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise BodyNotStorableError(f"the {what} {value!r:.60} holds NUL or a lone surrogate, which can not be stored")
    raise error(f"the {what} {value!r:.60} holds control or unprintable characters")


def check_priority(priority: object) -> int:
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= MAX_PRIORITY:
        raise InvalidPriorityError(
            f"a priority is an integer from 0 to {MAX_PRIORITY} (higher first), not {priority!r}"
        )
    return priority


def check_delay(delay: object, max_delay_s: float) -> timedelta:
    """Seconds or a timedelta, as a timedelta."""
    if isinstance(delay, timedelta):
        seconds = delay.total_seconds()
    elif isinstance(delay, (int, float)) and not isinstance(delay, bool):
        seconds = delay
    else:
        raise InvalidDelayError(
            f"a delay is a number of seconds or a timedelta, not {type(delay).__name__} ({delay!r:.40})"
        )
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidDelayError(f"a delay is finite and not negative, not {seconds!r}")
    if seconds > max_delay_s:
        raise InvalidDelayError(f"a delay is at most {max_delay_s:g} s (setting max_delay_s), not {seconds!r}")
    return timedelta(seconds=seconds)


def check_instant(when: object) -> datetime:
    """An aware datetime, in UTC; the past is fine and means now."""
    if not isinstance(when, datetime):
        raise InvalidScheduleError(f"an instant is an aware datetime, not {type(when).__name__} ({when!r:.40})")
    if when.tzinfo is None or when.utcoffset() is None:
        raise NaiveDatetimeError(f"{when.isoformat()} has no time zone; use datetime.now(timezone.utc) or an aware one")
    try:
        return when.astimezone(UTC)
    except OverflowError:
        raise InvalidScheduleError(f"{when.isoformat()} can not be said in UTC") from None


def encode_body(body: Any, max_bytes: int) -> str:
    """The body as compact JSON, or an error that names the place that is wrong."""
    _check_json(body, "$", 0)
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    size = len(text)
    # A character is at most 4 bytes: only texts near the limit have to be encoded to be measured.
    if size * 4 > max_bytes:
        size = len(text.encode())
        if size > max_bytes:
            raise BodyTooLargeError(
                f"the body is {size:,} bytes of JSON, more than {max_bytes:,} (setting max_body_bytes); "
                "store it elsewhere and schedule its name"
            )
    return text


def _check_json(value: Any, path: str, depth: int) -> None:
    kind = type(value)
    if kind is str:
        _check_storable(value, path)
    elif kind is int or kind is bool or value is None:
        return
    elif depth > MAX_DEPTH:
        raise BodyNotJSONError(f"{path[:80]}… is nested deeper than {MAX_DEPTH}, or holds itself")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BodyNotJSONError(f"{path}: the key {key!r:.40} is not a string, but {type(key).__name__}")
            _check_storable(key, path)
            _check_json(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BodyNotJSONError(f"{path}: {value!r} can not be said in JSON")
    elif isinstance(value, str):
        _check_storable(value, path)
    elif not isinstance(value, int):
        raise BodyNotJSONError(
            f"{path}: {kind.__name__} can not be said in JSON; convert it first (str(value), list(value), …)"
        )


def _check_storable(text: str, path: str) -> None:
    if text.isascii() and "\x00" not in text:
        return
    if "\x00" in text:
        raise BodyNotStorableError(f"{path} holds NUL (\\u0000), which can not be stored")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BodyNotStorableError(f"{path} holds a lone surrogate, which can not be stored") from None
