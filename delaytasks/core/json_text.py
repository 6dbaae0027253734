"""Compact JSON, made by orjson if it is installed."""

from __future__ import annotations

import json
import math
from typing import Any

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]  # the name must exist

dump_any = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # it is documented in no stub


def load_json(text: str) -> Any:
    """Return the value of a JSON text, as `json.loads` does.

    `json.loads` searches for white space around the text, which takes half of its time for a short
    text without any.
    """
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        end = -1
    return value if end == len(text) else json.loads(text)


def dump_json(value: Any) -> str:
    """Return the JSON of a value of JSON's own types. orjson treats other types differently."""
    if orjson is not None:
        try:
            return orjson.dumps(value).decode()
        except TypeError:
            pass  # an integer of more than 64 bits, a lone surrogate in an error text
    return dump_any(value)


#: Limits of `dump_flat`. Larger bodies are measured first: they may contain one text many times.
_MOST_VALUES, _MOST_CHARACTERS = 32, 128
_FLAT_TYPES = frozenset({int, bool, type(None)})


def dump_flat(value: Any) -> str | None:
    """Return the JSON of a small object with plain, storable values; None for all other bodies."""
    if orjson is None or type(value) is not dict or len(value) > _MOST_VALUES:
        return None
    for each in value.values():
        kind = type(each)
        if kind is str:
            if len(each) > _MOST_CHARACTERS:
                return None
        elif kind not in _FLAT_TYPES and (kind is not float or not math.isfinite(each)):
            return None
    try:
        text: bytes = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:
        return None
    return None if b"\\" in text else text.decode()  # an escaped character may not be storable
