"""The checks of what callers pass: tags, keys, durations, instants, numbers, meta, actors."""

from __future__ import annotations

import getpass
import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from operator import mul
from typing import Any, TypeGuard

from delaytasks.model.clock import MAX_ID, UTC
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.text import one_line, shown


def invalid(argument: str, problem: str) -> InvalidInputError:
    """Return the error for an argument, whose message is its name and then the problem."""
    return InvalidInputError(f"{argument} {problem}", argument)


# -- Durations as users type them: 90, 1h30m, 2d, 500ms -------------------------------------------


#: Seconds, a text that `parse_duration` reads, or a timedelta.
Delay = float | str | timedelta
#: The longest delay of a task, and the longest of other durations such as retry delays.
MAX_DELAY_S, MAX_WAIT_S = 10 * 366 * 86400.0, 366 * 86400.0

_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DECIMAL = r"[0-9]+(?:\.[0-9]+)?"
#: Each unit at most once, the largest first, because "30m1h" is usually a mistake.
_PARTS = re.compile(
    r"\s*".join(rf"(?:({_DECIMAL})\s*{unit}(?![a-z]))?" for unit in _UNITS), re.ASCII
)
_RULE = "write seconds (90, 0.5), or w, d, h, m, s, ms with the largest first (1h30m, 2d, 500ms)"


def parse_duration(text: str, argument: str = "delay") -> timedelta:
    """Convert a text such as "90", "1h30m", "2d" or "500ms" to a timedelta.

    Raises
    ------
    InvalidInputError
        If the text is not a duration, is negative or is too long.
    """
    typed = text.strip().lower()
    if typed.startswith("-"):
        raise invalid(argument, f"is not negative, as {text!r:.40} is; {_RULE}")
    if re.fullmatch(_DECIMAL, typed, re.ASCII):
        typed += "s"
    match = _PARTS.fullmatch(typed)
    if match is None or not any(match.groups()):
        raise invalid(argument, f"is a duration, not {text!r:.40}; {_RULE}")
    counts = (float(count or 0) for count in match.groups())
    try:
        return timedelta(seconds=sum(map(mul, counts, _UNITS.values())))
    except OverflowError:
        problem = f"is longer than a duration can be: {text!r:.40}; {_RULE}"
        raise invalid(argument, problem) from None


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


# -- Instants as users type them: 2030-01-31T18:00:00Z --------------------------------------------


def parse_instant(text: str, argument: str = "at", zone: tzinfo | None = None) -> datetime:
    """Return the instant of an ISO 8601 text. `zone` is the time zone of texts without one."""
    # Python 3.10 reads neither Z nor any number of digits of a second.
    typed = re.sub(r"\.(\d+)", lambda found: f".{found[1][:6]:0<6}", text.strip(), count=1)
    try:
        instant = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", typed))
    except ValueError:
        problem = "is not an instant; write it as 2030-01-31T18:00:00Z"
        raise InvalidInputError(f"{text!r:.40} {problem}", argument) from None
    if instant.tzinfo is not None:
        return instant
    if zone is None:
        remedy = "end it with Z for UTC, or with an offset (2030-01-31T18:00:00+02:00)"
        raise InvalidInputError(f"{text!r:.40} has no time zone; {remedy}", argument)
    return instant.replace(tzinfo=zone)


# -- Checks of numbers that callers pass. A bool is not a number ----------------------------------


def is_integer(value: object, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    """Return False for NaN as well."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )


def check_integer(
    value: object, argument: str, least: int, most: int, rule: str | None = None
) -> int:
    """Check an integer. `rule` is what the message says instead of the two bounds."""
    if not is_integer(value, least, most):
        rule = rule or f"{argument} is an integer from {least} to {most}"
        raise InvalidInputError(f"{rule}, not {shown(value)}", argument)
    return int(value)  # an int itself, because drivers may write a subclass (an enum) as text


def check_choice(word: object, argument: str, words: Sequence[str]) -> None:
    if word not in words:
        allowed = ", ".join(map(repr, words))
        raise invalid(argument, f"is one of {allowed}, not {shown(word)}")


TAG_LENGTH = 128
KEY_LENGTH = 191
LIMIT_KEY_LENGTH = 255
QUEUE_LENGTH = 100
ACTOR_LENGTH = 255
#: The key of an occurrence is the name of its schedule and a time of 25 characters.
SCHEDULE_NAME_LENGTH = KEY_LENGTH - 25
PAGE_MAX = 1000
MAX_PRIORITY = 9
#: The most concurrent calls of one tag in a process, and the most threads of a process for them.
MAX_SLOTS = 1000
_QUEUE = re.compile(r"[A-Za-z0-9_.-]+")


# -- The tags of tasks that the library itself runs, in each app with delaytasks -------------------


#: The tag of HTTP callbacks.
CALLBACK = "delaytasks.callback"
#: The callbacks that a process sends simultaneously.
CALLBACKS_IN_FLIGHT = 100
#: The tag of messages to queues.
MESSAGE = "delaytasks.message"
#: The row of the Celery task `shop.remind` has the tag `celery:shop.remind`, and its key is the id
#: of the Celery task. So the rows are found, paused, limited and cancelled like those of any other
#: tag.
CELERY_PREFIX = "celery:"
#: The tag under which the processor of all these rows is registered.
ANY_CELERY_TASK = "delaytasks.celery"
#: Hexadecimal digits of a hash that tell long names apart whose beginnings are equal.
_DIGITS = 16


def celery_tag(name: str) -> str:
    """Return the tag of a Celery task; a name that is too long for a tag is shortened."""
    tag = CELERY_PREFIX + name
    if len(tag) <= TAG_LENGTH:
        return tag
    return f"{tag[: TAG_LENGTH - _DIGITS - 1]}~{_digest(name)}"


def processor_tag(tag: str) -> str:
    """Return the tag under which the processor of `tag` may be registered as well."""
    return ANY_CELERY_TASK if tag.startswith(CELERY_PREFIX) else tag


def celery_key(task_id: str) -> str:
    """Return the key for the id of a Celery task, which may be any text."""
    try:
        return check_key(task_id)
    except InvalidInputError:
        return _digest(task_id)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]


# -- Checks of names and numbers -------------------------------------------------------------------


def check_tag(tag: object) -> str:
    return check_name(tag, "tag", TAG_LENGTH)


def check_key(key: object, argument: str = "key") -> str:
    return check_name(key, argument, KEY_LENGTH)


def check_limit_key(key: object) -> str:
    return check_name(key, "limit_key", LIMIT_KEY_LENGTH)


def check_schedule_name(name: object, argument: str = "name") -> str:
    return check_name(name, argument, SCHEDULE_NAME_LENGTH)


def check_actor(actor: object) -> str:
    return check_name(actor, "actor", ACTOR_LENGTH)


def check_page_limit(limit: object) -> int:
    return check_integer(limit, "limit", 1, PAGE_MAX)


def check_queue(queue: object) -> str:
    """Check a queue name. RabbitMQ limits its length, and the file transport uses it in paths."""
    name = check_name(queue, "queue", QUEUE_LENGTH)
    if not is_queue(name):
        raise invalid("queue", f"has letters, digits, '_', '.' and '-' only, not {shown(name)}")
    return name


def check_name(value: object, argument: str, longest: int) -> str:
    if (
        isinstance(value, str)
        and 0 < len(value) <= longest
        and value.isprintable()
        and value == value.strip()  # MySQL treats 'a' and 'a ' as equal
    ):
        return str.__str__(value)  # a str itself, because drivers write an enum by its own rules
    rule = f"has 1 to {longest} printable characters, and no blank at its ends, not {shown(value)}"
    if not isinstance(value, str):
        rule = f"is a string, such as str(order.id), not {type(value).__name__}"
    raise invalid(argument, rule)


#: The queue name of workers that serve all queues.
ALL_QUEUES = "*"
#: The pool names of workers without a broker begin with this.
POLLING_PREFIX = "direct/"


def serves(queues: Collection[str], queue: str) -> bool:
    """Return whether a worker with these logical queues serves this one."""
    return ALL_QUEUES in queues or queue in queues


def is_queue(name: str) -> bool:
    return bool(_QUEUE.fullmatch(name))


def check_priority(priority: object) -> int:
    rule = "a priority is an integer from 0 to 9 (higher first)"
    return check_integer(priority, "priority", 0, MAX_PRIORITY, rule)


def check_delay(delay: object, argument: str = "delay", most_s: float = MAX_DELAY_S) -> timedelta:
    """Convert seconds, a text with units such as "1h30m" or a timedelta to a timedelta."""
    if isinstance(delay, str) and has_unit(delay):
        delay = parse_duration(delay, argument)
    if isinstance(delay, timedelta):
        seconds = delay.total_seconds()
    elif isinstance(delay, (int, float)) and not isinstance(delay, bool):
        seconds = delay
    else:
        remedy = "; pass an instant as at=" if isinstance(delay, datetime) else ""
        raise invalid(
            argument,
            "is a number of seconds, a text with units such as '30m', or a timedelta, "
            f"not {type(delay).__name__} ({shown(delay)}){remedy}",
        )
    if not 0 <= seconds < math.inf:
        raise invalid(argument, f"is finite and not negative, not {shown(delay)}")
    if seconds > most_s:
        raise invalid(argument, f"is at most {show_duration(most_s)}, not {shown(delay)}")
    return timedelta(seconds=seconds)


def check_shift(shift: Any, argument: str = "by") -> timedelta:
    """Convert a delay to a timedelta that is not 0; it may be negative."""
    if isinstance(shift, str):
        is_negative, size = shift.lstrip().startswith("-"), shift.strip().removeprefix("-")
    else:
        zero: Any = timedelta() if isinstance(shift, timedelta) else 0
        is_negative = isinstance(shift, (timedelta, int, float)) and shift < zero
        size = -shift if is_negative else shift
    checked = check_delay(size, argument)
    if not checked:
        raise invalid(argument, "is not 0")
    return -checked if is_negative else checked


def check_wait(
    wait: object, argument: str, most_s: float = MAX_WAIT_S, *, may_be_zero: bool = True
) -> float:
    """Convert an option that is a duration to seconds. A text without a unit means seconds."""
    delay = parse_duration(wait, argument) if isinstance(wait, str) else wait
    seconds = check_delay(delay, argument, most_s).total_seconds()
    if not seconds and not may_be_zero:
        raise invalid(argument, "is more than 0")
    return seconds


def check_instant(at: object, argument: str = "at") -> datetime:
    """Convert an aware datetime to UTC. An instant in the past is valid and means now."""
    if not isinstance(at, datetime):
        raise invalid(argument, f"is an aware datetime, not {type(at).__name__} ({shown(at)})")
    if at.tzinfo is None or at.utcoffset() is None:
        raise InvalidInputError(
            f"{at.isoformat()} has no time zone; use datetime.now(timezone.utc) or an aware one",
            argument,
        )
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise InvalidInputError(f"{at.isoformat()} cannot be converted to UTC", argument) from None


# -- The meta of a task: a few pairs of short strings, such as a tenant or a trace context --------

# It is stored as JSON with sorted names, without blanks and in ASCII, so that a pair has one text.


MAX_PAIRS = 16
MAX_VALUE_LENGTH = 512
#: The longest text of all pairs as they are stored.
MAX_META_BYTES = 4096
_PAIR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_meta(meta: object) -> dict[str, str]:
    """Return the pairs in the order of their names."""
    if not isinstance(meta, Mapping):
        raise invalid("meta", f"is a dict of strings, not {shown(meta)}")
    if len(meta) > MAX_PAIRS:
        raise invalid("meta", f"has at most {MAX_PAIRS} pairs, not {len(meta)}")
    for name, value in meta.items():
        if not isinstance(name, str) or not _PAIR_NAME.fullmatch(name):
            raise InvalidInputError(
                f"a name in meta has 1 to 64 letters, digits, '_', '.' and '-', not {shown(name)}",
                "meta",
            )
        if not isinstance(value, str) or len(value) > MAX_VALUE_LENGTH:
            raise InvalidInputError(
                f"meta[{name!r}] is a string of up to {MAX_VALUE_LENGTH} characters, "
                f"not {shown(value)}",
                "meta",
            )
    return dict(sorted(meta.items()))


def encode_meta(meta: object) -> str | None:
    """Check the pairs, and return the text that is stored; None without pairs."""
    pairs = check_meta(meta)
    if not pairs:
        return None
    text = json.dumps(pairs, separators=(",", ":"))
    if len(text) > MAX_META_BYTES:
        raise invalid("meta", f"is longer than {MAX_META_BYTES} bytes: {len(text)}")
    return text


def decode_object(text: str | None) -> dict[str, Any]:
    """Return the object of a stored text. Another program may have written any text."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def decode_meta(text: str | None) -> dict[str, str]:
    return {name: pair for name, pair in decode_object(text).items() if isinstance(pair, str)}


def pair_text(name: str, value: str) -> str:
    """Return a pair as it occurs in the stored text.

    A value cannot contain this text, since quotation marks in a value follow a backslash.
    """
    return f"{json.dumps(name)}:{json.dumps(value)}"


# -- jitter ---------------------------------------------------------------------------------------

# Due times that are distributed over a period, so that many tasks do not become due together.


def share_of(name: str) -> float:
    """Return a number from 0 up to 1 that only depends on `name`, and is uniform over all names."""
    return int(_digest(name), 16) / 16.0**_DIGITS


@dataclass(frozen=True, slots=True)
class Spread:
    """The new due times of a bulk operation: each is up to `over` later than before."""

    over: timedelta

    def of(self, id: int, due: datetime) -> datetime:
        """Return the new due time of a task. For one task, it is the same in each call."""
        return due + share_of(str(id)) * self.over


# -- The name of the person or program that changes many tasks or a policy ------------------------


def actor_of(given: object) -> str:
    """Return the given name, or the user and host of this process."""
    if given is not None:
        return check_actor(given)
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        name = f"uid {os.getuid()}"
    return one_line(f"{name}@{socket.gethostname()}", ACTOR_LENGTH - 1)


def check_id(value: object, argument: str = "id") -> int:
    """Convert an integer or its decimal text to a task id, or raise `InvalidInputError`."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19:
        value = int(value)
    return check_integer(value, argument, 1, MAX_ID, f"{argument} is an integer from 1 to 2^63 - 1")
