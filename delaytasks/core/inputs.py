"""Validate the arguments of callers: tags, keys, delays, instants and bodies."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Any

from delaytasks.core.clock import UTC
from delaytasks.core.durations import parse_duration
from delaytasks.core.errors import (
    BodyNotJSONError,
    BodyNotStorableError,
    BodyTooLargeError,
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
from delaytasks.core.json_text import dump_any, dump_flat, dump_json
from delaytasks.core.states import Status
from delaytasks.core.text import shown

TAG_LENGTH = 128
KEY_LENGTH = 191
CONCURRENCY_KEY_LENGTH = 255
QUEUE_LENGTH = 100
ACTOR_LENGTH = 255
MAX_DEPTH = 100
PAGE_MAX = 1000
MAX_PRIORITY = 9
#: Python does not read integers of more than 4,300 digits.
_INTEGER_BITS = 14_280
_LARGE = 1 << 63
_PLAIN = frozenset({str, int, float, bool, type(None), dict, list, tuple})
_QUEUE = re.compile(r"[A-Za-z0-9_.-]+")


def check_tag(tag: object) -> str:
    return _check_name(tag, "tag", TAG_LENGTH, InvalidTagError)


def check_key(key: object) -> str:
    return _check_name(key, "key", KEY_LENGTH, InvalidKeyError)


def check_concurrency_key(key: object) -> str:
    return _check_name(key, "concurrency_key", CONCURRENCY_KEY_LENGTH, InvalidKeyError)


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


def check_limit(limit: object) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= PAGE_MAX:
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
        raise error(f"a {what} is a string, not {type(value).__name__}")
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
            f"the {what} {shown(value)} holds NUL or a lone surrogate, which cannot be stored"
        )
    raise error(f"the {what} {shown(value)} holds control or unprintable characters")


#: The queue name of workers that serve all queues.
ALL_QUEUES = "*"


def is_queue(name: str) -> bool:
    return bool(_QUEUE.fullmatch(name))


def check_priority(priority: object) -> int:
    if (
        not isinstance(priority, int)
        or isinstance(priority, bool)
        or not 0 <= priority <= MAX_PRIORITY
    ):
        raise InvalidPriorityError(
            f"a priority is an integer from 0 to {MAX_PRIORITY} (higher first), "
            f"not {shown(priority)}"
        )
    return int(priority)


def check_delay(delay: object, max_delay_s: float, what: str = "a delay") -> timedelta:
    """Convert seconds or a timedelta to a timedelta from 0 to `max_delay_s`."""
    if isinstance(delay, timedelta):
        seconds = delay.total_seconds()
    elif isinstance(delay, int) and not isinstance(delay, bool):
        seconds = min(max(delay, -1), 2**53)  # an integer may be too large for a float
    elif isinstance(delay, float):
        seconds = delay
    else:
        raise InvalidDelayError(
            f"{what} is a number of seconds or a timedelta, "
            f"not {type(delay).__name__} ({shown(delay)})"
        )
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidDelayError(f"{what} is finite and not negative, not {shown(delay)}")
    if seconds > max_delay_s:
        raise InvalidDelayError(
            f"{what} is at most {max_delay_s:g} s (setting max_delay_s), not {shown(delay)}"
        )
    return timedelta(seconds=seconds)


def check_wait(wait: object, max_s: float, what: str = "a delay") -> float:
    """Convert seconds, a timedelta or a text such as "1h30m" to seconds."""
    delay = parse_duration(wait) if isinstance(wait, str) else wait
    return check_delay(delay, max_s, what).total_seconds()


def check_due(delay: object, when: object) -> None:
    """Check that either a delay or an instant is given."""
    if (delay is None) == (when is None):
        raise InvalidScheduleError("give a delay or an instant (when), one of the two")


def check_instant(when: object) -> datetime:
    """Convert an aware datetime to UTC. An instant in the past is valid and means now."""
    if not isinstance(when, datetime):
        raise InvalidScheduleError(
            f"an instant is an aware datetime, not {type(when).__name__} ({shown(when)})"
        )
    if when.tzinfo is None or when.utcoffset() is None:
        raise NaiveDatetimeError(
            f"{when.isoformat()} has no time zone; use datetime.now(timezone.utc) or an aware one"
        )
    try:
        return when.astimezone(UTC)
    except OverflowError:
        raise InvalidScheduleError(f"{when.isoformat()} cannot be converted to UTC") from None


def encode_body(body: Any, max_bytes: int) -> str:
    """Return the body as compact JSON, or raise an error with the path of the invalid value."""
    flat = dump_flat(body)
    if flat is not None and len(flat) * 4 <= max_bytes:
        return flat
    check = _Check(max_bytes)
    check.size(body, ("$",), 0)
    try:
        text = dump_json(body) if check.is_plain else dump_any(body)
    except (TypeError, ValueError, RecursionError) as error:
        # A subclass of a JSON type may show another content to the encoder than to the check.
        raise BodyNotJSONError(
            f"$: {type(body).__name__} cannot be expressed in JSON ({type(error).__name__})"
        ) from None
    # A character has at most 4 bytes, so only texts near the limit must be encoded to be measured.
    if len(text) * 4 > max_bytes and (size := len(text.encode())) > max_bytes:
        raise _too_large(max_bytes, f": {size:,}")
    return text


def _too_large(max_bytes: int, size: str = "") -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is more than {max_bytes:,} bytes of JSON (setting max_body_bytes){size}; "
        "store it elsewhere and schedule its name"
    )


#: The path of a value in the body: the path of its container, and its key or index.
_Path = tuple[Any, ...]


class _Check:
    """Checks one body. If it contains a value many times, it fails before all of it is visited."""

    __slots__ = ("is_plain", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        #: Whether all values are of JSON's own types, without subclasses.
        self.is_plain = True

    def size(self, value: Any, path: _Path, depth: int) -> int:
        """Return a lower bound of the length of the JSON."""
        kind = type(value)
        if kind not in _PLAIN:
            self.is_plain = False
        if isinstance(value, str):
            return _check_storable(value, path)
        if value is None or isinstance(value, int):
            if value is not None and value.bit_length() > _INTEGER_BITS:
                raise BodyNotJSONError(
                    f"{_at(path)}: an integer of more than 4,300 digits cannot be read back"
                )
            return 1
        if isinstance(value, float):
            if not math.isfinite(value):
                raise BodyNotJSONError(f"{_at(path)}: {value!r} cannot be expressed in JSON")
            return 3
        if not isinstance(value, (dict, list, tuple)):
            raise BodyNotJSONError(
                f"{_at(path)}: {kind.__name__} cannot be expressed in JSON; "
                "convert it first (str(value), list(value), …)"
            )
        if depth >= MAX_DEPTH:
            raise BodyNotJSONError(
                f"{_at(path, 80)}… is nested deeper than {MAX_DEPTH}, or contains itself"
            )
        return (
            self._of_items(value, path, depth)
            if isinstance(value, dict)
            else self._of_list(value, path, depth)
        )

    def _of_items(self, value: dict[Any, Any], path: _Path, depth: int) -> int:
        size = 1
        for key, item in value.items():
            if not isinstance(key, str):
                raise BodyNotJSONError(
                    f"{_at(path)}: the key {shown(key)} is not a string, but {type(key).__name__}"
                )
            size += (_plain_size(key) or self.size(key, path, depth)) + 2
            size += _plain_size(item) or self.size(item, (path, key), depth + 1)
            if size > self.room:
                raise _too_large(self.room)
        return size

    def _of_list(self, value: list[Any] | tuple[Any, ...], path: _Path, depth: int) -> int:
        size = 1
        for index, item in enumerate(value):
            size += (_plain_size(item) or self.size(item, (path, index), depth + 1)) + 1
            if size > self.room:
                raise _too_large(self.room)
        return size


def _plain_size(value: Any) -> int:
    """Return a lower bound of the size of a valid value of the usual types; 0 for all others."""
    kind = type(value)
    if kind is str:
        return len(value) + 2 if value.isascii() and "\x00" not in value else 0
    if kind is int:
        return 1 if -_LARGE < value < _LARGE else 0
    return 1 if value is None or kind is bool else 0


def _check_storable(text: str, path: _Path) -> int:
    if not text.isascii() or "\x00" in text:
        if "\x00" in text:
            raise BodyNotStorableError(f"{_at(path)} holds NUL (\\u0000), which cannot be stored")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BodyNotStorableError(
                f"{_at(path)} holds a lone surrogate, which cannot be stored"
            ) from None
    return len(text) + 2


def _at(path: _Path, longest: int = 200) -> str:
    """Return a path as text, such as $.items[3].name."""
    names: list[str] = []
    while len(path) == 2:
        path, name = path
        names.append(f"[{name}]" if isinstance(name, int) else f".{name}")
    return "".join(["$", *reversed(names)])[:longest]
