"""JSON in its compact form, by orjson where that is installed."""

from __future__ import annotations

import json
import re
from typing import Any

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]  # so is the name known

dump_any = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dump_json(value: Any) -> str:
    """Of what is known to be of JSON's own types, subclasses of them left aside: of others orjson has its own views."""
    if orjson is not None:
        try:
            return orjson.dumps(value).decode()
        except TypeError:
            pass  # an integer of more than 64 bits, a lone surrogate in an error text
    return dump_any(value)


#: Values of which orjson says the same as json does, whatever they are.
_LEAVES = frozenset({str, int, float, bool, type(None)})
#: What may stand for something that is refused: NaN, or a character that can not be stored.
_SUSPECT = re.compile(rb"null|\\u")


def dump_flat(value: Any) -> str | None:
    """Of what most bodies are, an object with plain values, and nothing to be said against it; else None."""
    if orjson is None or type(value) is not dict or not _LEAVES.issuperset(map(type, value.values())):
        return None
    try:
        said: bytes = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:
        return None
    return None if _SUSPECT.search(said) else said.decode()
