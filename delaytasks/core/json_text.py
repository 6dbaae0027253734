"""JSON in its compact form, by orjson where that is installed."""

from __future__ import annotations

import json
import math
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


#: More values or longer texts are looked at first: a body may hold one text a million times.
_MOST_VALUES, _MOST_CHARACTERS = 32, 128
_PLAIN = frozenset({int, bool, type(None)})


def dump_flat(value: Any) -> str | None:
    """Of what most bodies are, a small object with plain values and nothing to be said against it; else None."""
    if orjson is None or type(value) is not dict or len(value) > _MOST_VALUES:
        return None
    for each in value.values():
        kind = type(each)
        if kind is str:
            if len(each) > _MOST_CHARACTERS:
                return None
        elif kind not in _PLAIN and (kind is not float or not math.isfinite(each)):
            return None
    try:
        said: bytes = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:
        return None
    return None if b"\\" in said else said.decode()  # some characters can not be stored
