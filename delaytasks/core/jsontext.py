"""JSON in its compact form, by orjson where that is installed."""

from __future__ import annotations

import json
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
