"""Convert the values of settings, which may come as text, to the types of the settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_BOOLS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def convert_setting(name: str, kind: str, value: Any) -> Any:
    """Convert the value of a setting to a type, which is given as the text of its annotation.

    Raises
    ------
    ValueError
        If the value does not have this type and cannot be converted.
    """
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        _checked("None" in kind, value)
        return None
    try:
        return _CONVERTERS[kind.removesuffix(" | None")](name, value)
    except (TypeError, LookupError, OverflowError) as error:
        raise ValueError from error


def _text(name: str, value: Any) -> str:
    if name == "redis_url" and isinstance(value, (list, tuple)):
        return ";".join(value)
    return str(_checked(isinstance(value, str), value))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    is_list = isinstance(value, (list, tuple))
    return tuple(_checked(is_list and all(isinstance(v, str) and v for v in value), value))


def _names(_: str, value: Any) -> dict[str, str]:
    mapping = json.loads(value) if isinstance(value, str) else value
    is_right = isinstance(mapping, Mapping) and all(
        isinstance(name, str) and name for pair in mapping.items() for name in pair
    )
    return dict(_checked(is_right, mapping))


def _bool(_: str, value: Any) -> bool:
    return _BOOLS[str(value).lower()]


def _int(_: str, value: Any) -> int:
    is_whole = not isinstance(value, bool) and float(value) == int(value)
    return int(_checked(is_whole, value))


def _float(_: str, value: Any) -> float:
    is_number = not isinstance(value, bool) and math.isfinite(float(value))
    return float(_checked(is_number, value))


def _checked(is_right: bool, value: T) -> T:
    if not is_right:
        raise ValueError
    return value


#: The function that converts a value, by the type of its setting.
_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "str": _text,
    "tuple[str, ...]": _texts,
    "Mapping[str, str]": _names,
    "bool": _bool,
    "int": _int,
    "float": _float,
}
