"""The JSON Schemas of responses, and the check of values by a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delaytasks.model.errors import InvalidInputError
from delaytasks.model.moves import Status
from delaytasks.model.text import needs_extra, shown
from delaytasks.operate.operations import TASK_ID, VERSION

with needs_extra("api", "the HTTP API"):
    from jsonschema import Draft202012Validator

JSONSchema = Mapping[str, Any]


def _open(properties: Mapping[str, JSONSchema], *optional: str) -> dict[str, Any]:
    """Return the schema of a response. Later versions may add names."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _each(names: str, schema: JSONSchema) -> dict[str, JSONSchema]:
    return dict.fromkeys(names.split(), schema)


_ANY: dict[str, Any] = {}
_TEXT, _COUNT, _STATUSES = {"type": "string"}, {"type": "integer"}, [each.name for each in Status]
_TEXT_OR_NULL = {"type": ["string", "null"]}
_INSTANT, _INSTANT_OR_NULL = ({**each, "format": "date-time"} for each in (_TEXT, _TEXT_OR_NULL))
#: The schemas that the document names, as in `#/components/schemas/Task`.
COMPONENTS: dict[str, dict[str, Any]] = {
    "Task": _open(
        {
            "id": TASK_ID.schema,
            "version": VERSION.schema,
            "meta": {"type": "object", "additionalProperties": _TEXT},
            "status": {"enum": _STATUSES},
            **_each("tag queue", _TEXT),
            **_each("key worker error", _TEXT_OR_NULL),
            **_each("priority runs", _COUNT),
            **_each("body result", _ANY),
            **_each("due_time expected_time", _INSTANT),
            **_each("execution_time create_time update_time", _INSTANT_OR_NULL),
        }
    ),
    "TaskPage": _open(
        {
            "tasks": {"type": "array", "items": {"$ref": "#/components/schemas/Task"}},
            "cursor": _TEXT_OR_NULL,
        }
    ),
    "CancelResult": _open(
        {
            **_each("is_cancelled is_requested", {"type": "boolean"}),
            "reason": _TEXT,
            "id": _TEXT_OR_NULL,
            "status": {"enum": [*_STATUSES, None]},
        }
    ),
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
    argument, said = path[-1] if path else name.split()[-1], error.message
    if error.validator == "required":
        argument = next(each for each in error.validator_value if each not in error.instance)
    elif error.validator == "additionalProperties":
        known = error.schema["properties"]
        argument = next(each for each in error.instance if each not in known)
        said = f"{shown(argument)} is unknown, and known are: {', '.join(known) or 'none'}"
    elif error.validator == "oneOf":
        argument, said = "delay", "give one of delay, at"
    place = ".".join([name, *path])
    raise InvalidInputError(f"{place}: {said}"[:MESSAGE_LENGTH], argument)
