"""What callers hand in, checked before anything is written: tags, keys, delays, instants, bodies."""

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
#: Python reads no integers of more than 4,300 digits.
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
    """Of a name or a number."""
    try:
        if isinstance(status, str):
            return Status[status.upper()]
        if isinstance(status, int) and not isinstance(status, bool):
            return Status(status)
    except (KeyError, ValueError):
        pass  # said below
    raise InvalidQueryError(
        f"status is one of {', '.join(s.name for s in Status)}, not {shown(status)}"
    )


def check_limit(limit: object) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= PAGE_MAX:
        raise InvalidQueryError(f"limit is an integer from 1 to {PAGE_MAX}, not {shown(limit)}")
    return limit


def check_queue(queue: object) -> str:
    """Brokers make more of it than text: RabbitMQ counts its bytes, the filesystem transport takes it for a path."""
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
    if value != value.strip():  # MySQL takes 'a' and 'a ' for the same
        raise error(f"a {what} must not begin or end with a blank: {shown(value)}")
    if len(value) > longest:
        raise error(
            f"a {what} has at most {longest} characters, this one has {len(value)}: {value[:40]!r}…"
        )
    if value.isprintable():
        return str.__str__(
            value
        )  # a plain one: drivers write subclasses (enums) as they say themselves
    if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise BodyNotStorableError(
            f"the {what} {shown(value)} holds NUL or a lone surrogate, which can not be stored"
        )
    raise error(f"the {what} {shown(value)} holds control or unprintable characters")


#: What a worker says that it serves, if it serves whatever queue there is.
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
            f"a priority is an integer from 0 to {MAX_PRIORITY} (higher first), not {shown(priority)}"
        )
    return int(priority)


def check_delay(delay: object, max_delay_s: float, what: str = "a delay") -> timedelta:
    """Seconds or a timedelta, as a timedelta."""
    if isinstance(delay, timedelta):
        seconds = delay.total_seconds()
    elif isinstance(delay, int) and not isinstance(delay, bool):
        seconds = min(max(delay, -1), 2**53)  # integers may be longer than any float
    elif isinstance(delay, float):
        seconds = delay
    else:
        raise InvalidDelayError(
            f"{what} is a number of seconds or a timedelta, not {type(delay).__name__} ({shown(delay)})"
        )
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidDelayError(f"{what} is finite and not negative, not {shown(delay)}")
    if seconds > max_delay_s:
        raise InvalidDelayError(
            f"{what} is at most {max_delay_s:g} s (setting max_delay_s), not {shown(delay)}"
        )
    return timedelta(seconds=seconds)


def check_wait(wait: object, max_s: float, what: str = "a delay") -> float:
    """Seconds, a timedelta or text ("1h30m"), as seconds."""
    return check_delay(
        parse_duration(wait) if isinstance(wait, str) else wait, max_s, what
    ).total_seconds()


def check_due(delay: object, when: object) -> None:
    """That one of the two is given, and not both."""
    if (delay is None) == (when is None):
        raise InvalidScheduleError("give a delay or an instant (when), one of the two")


def check_instant(when: object) -> datetime:
    """An aware datetime, in UTC; the past is fine and means now."""
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
        raise InvalidScheduleError(f"{when.isoformat()} can not be said in UTC") from None


def encode_body(body: Any, max_bytes: int) -> str:
    """The body as compact JSON, or an error that names the place that is wrong."""
    flat = dump_flat(body)
    if flat is not None and len(flat) * 4 <= max_bytes:
        return flat
    check = _Check(max_bytes)
    check.size(body, ("$",), 0)
    try:
        text = dump_json(body) if check.is_plain else dump_any(body)
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # types that show one content here and another one there
        raise BodyNotJSONError(
            f"$: {type(body).__name__} can not be said in JSON ({type(error).__name__})"
        ) from None
    # A character is at most 4 bytes: only texts near the limit have to be encoded to be measured.
    if len(text) * 4 > max_bytes and (size := len(text.encode())) > max_bytes:
        raise _too_large(max_bytes, f": {size:,}")
    return text


def _too_large(max_bytes: int, size: str = "") -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is more than {max_bytes:,} bytes of JSON (setting max_body_bytes){size}; "
        "store it elsewhere and schedule its name"
    )


#: Where a value is: the names and places of all that it is in, put into words when something is wrong.
_Path = tuple[Any, ...]


class _Check:
    """Of one body. One that holds a part millions of times is found too large long before all of it is looked at."""

    __slots__ = ("is_plain", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        #: All of it is of JSON's own types, and of no subclass of them.
        self.is_plain = True

    def size(self, value: Any, path: _Path, depth: int) -> int:
        """The number of bytes that the JSON has at least."""
        kind = type(value)
        if kind not in _PLAIN:
            self.is_plain = False
        if isinstance(value, str):
            return _check_storable(value, path)
        if value is None or isinstance(value, int):
            if value is not None and value.bit_length() > _INTEGER_BITS:
                raise BodyNotJSONError(
                    f"{_at(path)}: an integer so long (more than 4,300 digits) can not be read back"
                )
            return 1
        if isinstance(value, float):
            if not math.isfinite(value):
                raise BodyNotJSONError(f"{_at(path)}: {value!r} can not be said in JSON")
            return 3
        if not isinstance(value, (dict, list, tuple)):
            raise BodyNotJSONError(
                f"{_at(path)}: {kind.__name__} can not be said in JSON; convert it first (str(value), list(value), …)"
            )
        if depth >= MAX_DEPTH:
            raise BodyNotJSONError(
                f"{_at(path, 80)}… is nested deeper than {MAX_DEPTH}, or holds itself"
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
    """Of what is mostly met, and has nothing to be said against it; else 0."""
    kind = type(value)
    if kind is str:
        return len(value) + 2 if value.isascii() and "\x00" not in value else 0
    if kind is int:
        return 1 if -_LARGE < value < _LARGE else 0
    return 1 if value is None or kind is bool else 0


def _check_storable(text: str, path: _Path) -> int:
    if not text.isascii() or "\x00" in text:
        if "\x00" in text:
            raise BodyNotStorableError(f"{_at(path)} holds NUL (\\u0000), which can not be stored")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BodyNotStorableError(
                f"{_at(path)} holds a lone surrogate, which can not be stored"
            ) from None
    return len(text) + 2


def _at(path: _Path, longest: int = 200) -> str:
    """As in $.items[3].name."""
    names: list[str] = []
    while len(path) == 2:
        path, name = path
        names.append(f"[{name}]" if isinstance(name, int) else f".{name}")
    return "".join(["$", *reversed(names)])[:longest]
