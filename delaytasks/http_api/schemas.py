"""The JSON Schemas of parameters, requests and responses, and the check of values by them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from delaytasks.model.errors import InvalidInputError
from delaytasks.model.filters import MAX_IDS
from delaytasks.model.inputs import (
    KEY_LENGTH,
    LIMIT_KEY_LENGTH,
    MAX_PRIORITY,
    PAGE_MAX,
    QUEUE_LENGTH,
    TAG_LENGTH,
)
from delaytasks.model.moves import Status
from delaytasks.model.text import needs_extra

with needs_extra("api", "the HTTP API"):
    from jsonschema import Draft202012Validator

JSONSchema = Mapping[str, Any]

#: The most keys of one touch.
MOST_KEYS = 1000


def _text(longest: int, description: str = "") -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": longest}
    return {**schema, "description": description} if description else schema


def _described(schema: JSONSchema, description: str) -> dict[str, Any]:
    return {**schema, "description": description}


def _closed(properties: Mapping[str, JSONSchema], *required: str) -> dict[str, Any]:
    """Return the schema of a request. A name that is not in it is refused."""
    found = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**found, "required": list(required)} if required else found


def _open(properties: Mapping[str, JSONSchema], *optional: str) -> dict[str, Any]:
    """Return the schema of a response. Later versions may add names."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


ANY_VALUE: dict[str, Any] = {"description": "Any JSON value."}
TAG = _text(TAG_LENGTH, "The name of the processor.")
KEY_TEXT = _text(KEY_LENGTH, "A name of the task within its tag.")
QUEUE = _text(QUEUE_LENGTH)
TASK_ID = {"type": "string", "pattern": "^[0-9]{1,19}$", "description": "The id of a task."}
DELAY = {
    "type": ["number", "string"],
    "minimum": 0,
    "minLength": 2,
    "maxLength": 100,
    "description": "Seconds, or a text such as 30m or 1h30m.",
}
INSTANT_SCHEMA = {
    "type": "string",
    "format": "date-time",
    "maxLength": 40,
    "description": "An instant with a time zone.",
}
_VERSION = {"type": "integer", "format": "int64", "minimum": 0, "maximum": 2**63 - 1}
VERSION = {**_VERSION, "description": "The task must still have this version."}
PAIRS = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": 512},
    "description": "A few pairs of strings.",
}
RETRIES = {
    "type": ["string", "integer"],
    "minimum": 0,
    "minLength": 1,
    "maxLength": 1000,
    "description": "A retry schedule such as '15s 3m', or a number of retries.",
}
TEXT_OR_NULL = {"type": ["string", "null"]}
PRIORITY = {"type": "integer", "minimum": 0, "maximum": MAX_PRIORITY}
BOOLEAN = {"type": "boolean"}
COUNT = {"type": "integer"}

_DUE = {
    "delay": _described(DELAY, "Seconds from now, or a text such as 30m. Give delay or at."),
    "at": _described(INSTANT_SCHEMA, "The due time, instead of delay."),
}
#: The options of tasks and of callbacks, which have the names of those in Python.
_OPTIONS = {
    **_DUE,
    "key": KEY_TEXT,
    "on_conflict": {
        "enum": ["reject", "keep", "replace", "take"],
        "description": "The rule for a key that a live task has; reject by default.",
    },
    "queue": QUEUE,
    "priority": PRIORITY,
    "retries": RETRIES,
    "max_late": _described(DELAY, "A task that starts later than this is cancelled."),
    "limit_key": _text(LIMIT_KEY_LENGTH),
    "meta": PAIRS,
    "jitter": _described(DELAY, "The task is due up to this time later."),
}
NEW_TASK = _closed(
    {
        "tag": TAG,
        "body": _described(ANY_VALUE, "The argument of the processor."),
        "body_version": {"type": "integer", "minimum": 1},
        **_OPTIONS,
    },
    "tag",
)
NEW_CALLBACK = _closed(
    {
        "url": _described(_text(2000), "The URL that receives a POST of the body."),
        "body": _described(ANY_VALUE, "The body of the POST."),
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
        **_OPTIONS,
    },
    "url",
)
_HOW_TO_CANCEL = {"version": VERSION, "running": _described(BOOLEAN, "Ask a running task to stop.")}
CANCEL_TASK = _closed(_HOW_TO_CANCEL)
RESCHEDULE_TASK = _closed({**_DUE, "version": VERSION})
TOUCH_TASK = _closed({"delay": DELAY}, "delay")
RERUN_TASK = _closed({"delay": DELAY, "version": VERSION})
_NAMED = {"tag": TAG, "key": KEY_TEXT}
CANCEL_KEY = _closed({**_NAMED, **_HOW_TO_CANCEL}, "tag", "key")
RESCHEDULE_KEY = _closed({**_NAMED, **_DUE, "version": VERSION}, "tag", "key")
TOUCH_KEYS = _closed(
    {
        "tag": TAG,
        "keys": {"type": "array", "items": KEY_TEXT, "minItems": 1, "maxItems": MOST_KEYS},
        "delay": DELAY,
    },
    "tag",
    "keys",
    "delay",
)

# -- parameters of queries ------------------------------------------------------------------------

LIMIT = {"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": 100}
FIND_PARAMETERS: dict[str, dict[str, Any]] = {
    "tag": TAG,
    "ids": {
        "type": "array",
        "items": TASK_ID,
        "maxItems": MAX_IDS,
        "description": "The ids of some tasks.",
    },
    "key": _described(KEY_TEXT, "The key. A finished task keeps its key."),
    "key_prefix": _described(KEY_TEXT, "The beginning of the key."),
    "queue": QUEUE,
    "status": {
        "type": "array",
        "items": {"enum": [status.name for status in Status]},
        "description": "One status, or several.",
    },
    "meta": {
        "type": "array",
        "items": {"type": "string", "pattern": "^[^=]+=", "maxLength": 600},
        "description": "Pairs such as tenant=acme.",
    },
    "error": _described(_text(1000), "A pattern of the error text, as *timeout*."),
    "since": _described(INSTANT_SCHEMA, "Due at or after."),
    "until": _described(INSTANT_SCHEMA, "Due before."),
    "created_since": _described(INSTANT_SCHEMA, "Scheduled at or after."),
    "created_until": _described(INSTANT_SCHEMA, "Scheduled before."),
    "updated_until": _described(INSTANT_SCHEMA, "Last changed before."),
    "cursor": _described(_text(200), "The cursor of the page before."),
    "limit": LIMIT,
    "newest_first": BOOLEAN,
}
STATISTICS_PARAMETERS: dict[str, dict[str, Any]] = {
    "since": _described(_text(100), "An instant, or a duration before now; 1h by default."),
    "tag": {"type": "array", "items": TAG, "description": "Only these tags."},
}

# -- responses ------------------------------------------------------------------------------------

_INSTANT_OR_NULL = {"type": ["string", "null"], "format": "date-time"}
TASK = _open(
    {
        "id": TASK_ID,
        "tag": {"type": "string"},
        "key": TEXT_OR_NULL,
        "status": _described(
            {"type": "string"}, f"As {', '.join(status.name for status in Status)}"
        ),
        "queue": {"type": "string"},
        "priority": COUNT,
        "body": ANY_VALUE,
        "due_time": _INSTANT_OR_NULL,
        "expected_time": _INSTANT_OR_NULL,
        "execution_time": _INSTANT_OR_NULL,
        "create_time": _INSTANT_OR_NULL,
        "update_time": _INSTANT_OR_NULL,
        "runs": COUNT,
        "version": _VERSION,
        "worker": TEXT_OR_NULL,
        "error": TEXT_OR_NULL,
        "meta": {"type": "object", "additionalProperties": {"type": "string"}},
        "result": ANY_VALUE,
    }
)
_TASK = {"$ref": "#/components/schemas/Task"}
#: The schemas that the document names, as in `#/components/schemas/Task`.
COMPONENTS: dict[str, dict[str, Any]] = {
    "Task": TASK,
    "TaskPage": _open({"tasks": {"type": "array", "items": _TASK}, "cursor": TEXT_OR_NULL}),
    "Attempts": _open(
        {
            "attempts": {
                "type": "array",
                "items": _open(
                    {
                        "number": COUNT,
                        "began": _INSTANT_OR_NULL,
                        "ended": INSTANT_SCHEMA,
                        "worker": TEXT_OR_NULL,
                        "error": TEXT_OR_NULL,
                    }
                ),
            }
        }
    ),
    "CancelResult": _open(
        {
            "is_cancelled": BOOLEAN,
            "is_requested": BOOLEAN,
            "reason": {"type": "string"},
            "id": TEXT_OR_NULL,
            "status": TEXT_OR_NULL,
        }
    ),
    "TouchResult": _open(
        {
            "touched": {"type": "array", "items": {"type": "string"}},
            "gone": {"type": "array", "items": {"type": "string"}},
        }
    ),
    "Statistics": _open({"tags": {"type": "object", "additionalProperties": {"type": "object"}}}),
    "Problem": _open(
        {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": COUNT,
            "detail": {"type": "string"},
            "argument": {"type": "string"},
        },
        "argument",
    ),
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
