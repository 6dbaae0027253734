"""Encode bodies and results as JSON that every database can store and every worker can read."""

from __future__ import annotations

import math
from typing import Any

from delaytasks.core.errors import BodyNotJSONError, BodyNotStorableError, BodyTooLargeError
from delaytasks.core.json_text import dump_any, dump_flat, dump_json
from delaytasks.core.model_instances import key_remedy
from delaytasks.core.text import shown

MAX_DEPTH = 100
#: Python does not read integers of more than 4,300 digits.
_INTEGER_BITS = 14_280
_LARGE = 1 << 63
_JSON_TYPES = frozenset({str, int, float, bool, type(None), dict, list, tuple})


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
        if kind not in _JSON_TYPES:
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
            remedy = key_remedy(value) or "; convert it first (str(value), list(value), …)"
            raise BodyNotJSONError(
                f"{_at(path)}: {kind.__name__} cannot be expressed in JSON{remedy}"
            )
        if depth >= MAX_DEPTH:
            raise BodyNotJSONError(
                f"{_at(path, 80)}… is nested deeper than {MAX_DEPTH}, or contains itself"
            )
        if isinstance(value, dict):
            return self._of_items(value, path, depth)
        return self._of_list(value, path, depth)

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
            raise BodyNotStorableError(
                f"{_at(path)} contains NUL (\\u0000), which cannot be stored"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BodyNotStorableError(
                f"{_at(path)} contains a lone surrogate, which cannot be stored"
            ) from None
    return len(text) + 2


def _at(path: _Path, longest: int = 200) -> str:
    """Return a path as text, such as $.items[3].name."""
    names: list[str] = []
    while len(path) == 2:
        path, name = path
        names.append(f"[{name}]" if isinstance(name, int) else f".{name}")
    return "".join(["$", *reversed(names)])[:longest]
