"""The JSON Schemas of responses, and the check of values by a schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from delaytasks.model.errors import InvalidInputError
from delaytasks.model.text import needs_extra
from delaytasks.operate.operations import INSTANT, TASK_ID, VERSION

with needs_extra("api", "the HTTP API"):
    from jsonschema import Draft202012Validator

JSONSchema = Mapping[str, Any]


def _open(properties: Mapping[str, JSONSchema], *optional: str) -> dict[str, Any]:
    """Return the schema of a response. Later versions may add names."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _each(names: str, schema: JSONSchema) -> dict[str, JSONSchema]:
    return dict.fromkeys(names.split(), schema)


def _list(items: JSONSchema) -> dict[str, Any]:
    return {"type": "array", "items": items}


_ANY: dict[str, Any] = {}
_TEXT, _COUNT, _BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_INSTANT_OR_NULL = {**_TEXT_OR_NULL, "format": "date-time"}
#: The schemas that the document names, as in `#/components/schemas/Task`.
COMPONENTS: dict[str, dict[str, Any]] = {
    "Task": _open(
        {
            "id": TASK_ID.schema,
            "version": VERSION.schema,
            "meta": {"type": "object", "additionalProperties": _TEXT},
            **_each("tag status queue", _TEXT),
            **_each("key worker error", _TEXT_OR_NULL),
            **_each("priority runs", _COUNT),
            **_each("body result", _ANY),
            **_each("due_time expected_time execution_time", _INSTANT_OR_NULL),
            **_each("create_time update_time", _INSTANT_OR_NULL),
        }
    ),
    "TaskPage": _open(
        {"tasks": _list({"$ref": "#/components/schemas/Task"}), "cursor": _TEXT_OR_NULL}
    ),
    "Attempts": _open(
        {
            "attempts": _list(
                _open(
                    {
                        "number": _COUNT,
                        "began": _INSTANT_OR_NULL,
                        "ended": INSTANT.schema,
                        **_each("worker error", _TEXT_OR_NULL),
                    }
                )
            )
        }
    ),
    "CancelResult": _open(
        {
            **_each("is_cancelled is_requested", _BOOLEAN),
            "reason": _TEXT,
            **_each("id status", _TEXT_OR_NULL),
        }
    ),
    "TouchResult": _open(_each("touched gone", _list(_TEXT))),
    "Statistics": _open({"tags": {"type": "object", "additionalProperties": {"type": "object"}}}),
    "Problem": _open({**_each("type title detail argument", _TEXT), "status": _COUNT}, "argument"),
}

# -- check ----------------------------------------------------------------------------------------

#: The most characters of a message, which may quote the value.
MESSAGE_LENGTH = 300


def check_value(value: Any, schema: JSONSchema, name: str) -> None:
    """Raise `InvalidInputError` unless a value matches a schema.

    Parameters
    ----------
    name
        The place of the value, for the message.
    """
    error = next(Draft202012Validator(schema).iter_errors(value), None)
    if error is None:
        return
    path = [each for each in error.path if isinstance(each, str)]
    argument = path[-1] if path else re.split(r"[ .]", name)[-1]
    if error.validator == "required":
        argument = next(each for each in error.validator_value if each not in error.instance)
    elif error.validator == "additionalProperties":
        argument = next(each for each in error.instance if each not in error.schema["properties"])
    place = ".".join([name, *path])
    raise InvalidInputError(f"{place}: {error.message}"[:MESSAGE_LENGTH], argument)
