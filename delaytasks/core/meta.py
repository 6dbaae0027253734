"""The meta of a task: a few pairs of short strings, such as a tenant or a trace context.

It is stored as JSON with sorted names, without blanks and in ASCII, so that a pair has one text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from delaytasks.core.errors import InvalidMetaError
from delaytasks.core.text import shown

MAX_PAIRS = 16
MAX_VALUE_LENGTH = 512
#: The longest text of all pairs as they are stored.
MAX_META_BYTES = 4096
_PAIR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_meta(meta: object) -> dict[str, str]:
    """Return the pairs in the order of their names."""
    if not isinstance(meta, Mapping):
        raise InvalidMetaError(f"meta is a dict of strings, not {shown(meta)}")
    if len(meta) > MAX_PAIRS:
        raise InvalidMetaError(f"meta has at most {MAX_PAIRS} pairs, not {len(meta)}")
    for name, value in meta.items():
        if not isinstance(name, str) or not _PAIR_NAME.fullmatch(name):
            raise InvalidMetaError(
                f"a name in meta has 1 to 64 letters, digits, '_', '.' and '-', not {shown(name)}"
            )
        if not isinstance(value, str) or len(value) > MAX_VALUE_LENGTH:
            raise InvalidMetaError(
                f"meta[{name!r}] is a string of up to {MAX_VALUE_LENGTH} characters, "
                f"not {shown(value)}"
            )
    return dict(sorted(meta.items()))


def encode_meta(meta: object) -> str | None:
    """Check the pairs, and return the text that is stored; None without pairs."""
    pairs = check_meta(meta)
    if not pairs:
        return None
    text = json.dumps(pairs, separators=(",", ":"))
    if len(text) > MAX_META_BYTES:
        raise InvalidMetaError(f"meta is longer than {MAX_META_BYTES} bytes: {len(text)}")
    return text


def decode_meta(text: str | None) -> dict[str, str]:
    """Return the pairs of a stored text. Another program may have written any text."""
    try:
        pairs = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(pairs, dict):
        return {}
    return {name: value for name, value in pairs.items() if isinstance(value, str)}


def pair_text(name: str, value: str) -> str:
    """Return a pair as it occurs in the stored text.

    A value cannot contain this text, since quotation marks in a value follow a backslash.
    """
    return f"{json.dumps(name)}:{json.dumps(value)}"
