"""Checks values by the JSON Schemas of the OpenAPI document.

The schemas in `schemas.py` use only the keywords that this module checks, so a request that
contradicts the document is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from delaytasks.core.errors import InvalidInputError
from delaytasks.core.text import shown

JSONSchema = Mapping[str, Any]
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class InvalidRequestError(InvalidInputError):
    """A value of a request contradicts the OpenAPI document."""


def check_value(value: Any, schema: JSONSchema, name: str) -> None:
    """Raise `InvalidRequestError` unless a value matches a schema.

    Parameters
    ----------
    name
        The place of the value, for the message.
    """
    _check_type(value, schema, name)
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidRequestError(f"{name} is one of {schema['enum']}, not {shown(value)}")
    if isinstance(value, str):
        _check_text(value, schema, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_size(value, schema.get("minimum"), schema.get("maximum"), name)
    elif isinstance(value, list):
        _check_size(len(value), schema.get("minItems"), schema.get("maxItems"), f"length of {name}")
        for index, item in enumerate(value):
            check_value(item, schema.get("items", {}), f"{name}[{index}]")
    elif isinstance(value, dict):
        _check_object(value, schema, name)


def _check_type(value: Any, schema: JSONSchema, name: str) -> None:
    if "type" not in schema:
        return
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    for each in names:
        # True is an int in Python, and no number in JSON.
        is_number = each in ("integer", "number")
        if isinstance(value, _PYTHON_TYPES[each]) and not (is_number and isinstance(value, bool)):
            return
    raise InvalidRequestError(f"{name} is of type {' or '.join(names)}, not {shown(value)}")


def _check_text(value: str, schema: JSONSchema, name: str) -> None:
    longest = schema.get("maxLength")
    _check_size(len(value), schema.get("minLength"), longest, f"length of {name}")
    pattern = schema.get("pattern")
    if pattern is not None and not re.search(pattern, value):
        raise InvalidRequestError(f"{name} does not match {pattern}: {shown(value)}")


def _check_size(size: float, least: float | None, most: float | None, name: str) -> None:
    if least is not None and size < least:
        raise InvalidRequestError(f"the {name} is at least {least}")
    if most is not None and size > most:
        raise InvalidRequestError(f"the {name} is at most {most}")


def _check_object(value: Mapping[str, Any], schema: JSONSchema, name: str) -> None:
    properties: Mapping[str, JSONSchema] = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    for required in schema.get("required", ()):
        if required not in value:
            raise InvalidRequestError(f"{name} has no {required!r}")
    for key, item in value.items():
        if key in properties:
            check_value(item, properties[key], f"{name}.{key}")
        elif others is False:
            known = ", ".join(properties) or "none"
            raise InvalidRequestError(f"{name} has an unknown name {shown(key)} (known: {known})")
        else:
            check_value(item, others, f"{name}[{shown(key)}]")
