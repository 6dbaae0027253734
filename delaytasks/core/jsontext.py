"""JSON in its compact form, by orjson where that is installed."""

from __future__ import annotations

import json
from typing import Any

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dump_json(value: Any) -> str:
    """Of what is known to be JSON; `TypeError` or `ValueError` when it is not after all."""
    if orjson is not None:
        try:
            return orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()
        except TypeError:
            pass  # an integer of more than 64 bits, a subclass: the other one can, or says what is wrong
    return _encode(value)
