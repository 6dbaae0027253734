"""Rules for the values of single settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from delaytasks.core.encryption import are_keys
from delaytasks.core.ids import MAX_SHARDS
from delaytasks.core.inputs import is_queue

_IDENTIFIER = re.compile(r"[A-Za-z0-9_]*")


class Rule(NamedTuple):
    #: The end of the error message.
    text: str
    allows: Callable[[Any], bool]


def one_of(*names: str) -> Rule:
    return Rule(f"is {', '.join(map(repr, names[:-1]))} or {names[-1]!r}", lambda v: v in names)


NAME = Rule("has letters, digits, '_', '.' and '-' only", is_queue)
QUEUES = Rule(
    "queues have letters, digits, '_', '.' and '-' only", lambda v: all(map(is_queue, v.values()))
)
IDENTIFIER = Rule("has letters, digits and '_' only", lambda v: bool(_IDENTIFIER.fullmatch(v)))
SLOT_COUNT = Rule("is a power of two, at most 1024", lambda v: v in {1 << n for n in range(11)})
KEYS = Rule(
    "each is a different key, the URL-safe base64 of 32 random bytes; 'plain' may precede them",
    are_keys,
)
NOT_NEGATIVE = Rule("must not be negative", lambda v: v >= 0)
SHARD = Rule(f"is from 0 to {MAX_SHARDS - 1}", lambda v: 0 <= v < MAX_SHARDS)
AT_MOST_1000 = Rule("is at most 1000", lambda v: v <= 1000)
AT_MOST_1000_YEARS = Rule("is at most a thousand years", lambda v: v <= 1000 * 366 * 86400)
