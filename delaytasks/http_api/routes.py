"""The HTTP API: its application, its routes, and how a request is read, checked and answered.

The application and the OpenAPI document are made from the table.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from delaytasks.client import DelayTasks
from delaytasks.http_api.api_keys import OWN_PREFIX, ApiKey, ApiKeyFile, ApiKeys
from delaytasks.model.errors import (
    DelayTaskError,
    InvalidInputError,
    OutcomeUnknownError,
    StoreError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.model.inputs import CALLBACK, CELERY_PREFIX
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import needs_extra, shown
from delaytasks.operate.operations import (
    KEY,
    OPERATIONS,
    TAG,
    TASK_ID,
    VERSION,
    Operation,
    Parameter,
    document_of,
    text,
)
from delaytasks.operate.serving import add_probes
from delaytasks.runtime import runtime_of

with needs_extra("api", "the HTTP API"):
    from flask import Flask, Response, request
    from jsonschema import Draft202012Validator
    from werkzeug import exceptions
    from werkzeug.datastructures import WWWAuthenticate

logger = logging.getLogger(__name__)
#: The status of each error. The first class that matches decides.
STATUS_OF_ERROR: tuple[tuple[type[DelayTaskError], int], ...] = (
    (InvalidInputError, 400),
    (TaskNotFoundError, 404),
    (TaskStateError, 409),
    (OutcomeUnknownError, 504),
    (StoreError, 503),
)
#: The media type of these documents.
PROBLEM_TYPE = "application/problem+json"
#: Seconds after which a caller may repeat a request that the database could not serve.
REPEAT_AFTER_S = 5

# -- the schemas of responses, and the check of values by a schema --------------------------------

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


# -- the routes, from the table of operations -----------------------------------------------------

#: No caller chooses these: an id may be that of a hidden task, and a key's name is the actor.
_NOT_OF_CALLERS = ("id", "actor")
_OF_KEY = (replace(TAG, is_required=True), replace(KEY, is_required=True))
IDEMPOTENCY = Parameter(
    "Idempotency-Key", text(255), "A request that is repeated with this key schedules nothing more."
)


@dataclass(frozen=True)
class Route:
    """One request of the API, which performs an operation."""

    name: str
    method: str
    #: As in OpenAPI, for example `/v1/tasks/{id}`.
    path: str
    operation: Operation

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters of the query or of the body."""
        given = {each.name: each for each in self.operation.parameters}
        if self.path.startswith("/v1/keys/") and "tag" not in given:
            given = {**{each.name: each for each in _OF_KEY}, **given}
        return {name: each for name, each in given.items() if name not in _NOT_OF_CALLERS}

    @cached_property
    def schema(self) -> JSONSchema:
        """The schema of the query or of the body. Other names are refused."""
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: each.schema for name, each in self.parameters.items()},
            "additionalProperties": False,
        }
        if required := [name for name, each in self.parameters.items() if each.is_required]:
            schema["required"] = required
        if "at" in self.parameters:
            schema["oneOf"] = [{"required": ["delay"]}, {"required": ["at"]}]
        return schema

    @property
    def has_body(self) -> bool:
        return self.method != "GET"

    @property
    def needs_body(self) -> bool:
        """Whether an empty document does not match the schema."""
        return "required" in self.schema or "oneOf" in self.schema

    @property
    def takes_idempotency_key(self) -> bool:
        """Whether repetitions are detected."""
        return self.operation.who == "schedule"

    @property
    def is_of_tag(self) -> bool:
        """Whether the route concerns one tag, so that a scope with a pattern may allow it."""
        return self.takes_idempotency_key or "{id}" in self.path or "/keys/" in self.path

    @property
    def summary(self) -> str:
        return re.split("[.:]", self.operation.help)[0]

    @property
    def requires(self) -> str:
        """The scopes that allow it."""
        pattern = "a scope schedule:PATTERN that matches the tag"
        if self.takes_idempotency_key:
            return pattern
        scope = f"the scope {self.operation.who}"
        return f"{scope}, or {pattern}" if self.is_of_tag else scope


ROUTES = [
    Route(name, method, path, operation)
    for operation in OPERATIONS.values()
    for name, (method, path) in operation.routes.items()
]

# -- a request ------------------------------------------------------------------------------------


def _perform(delays: DelayTasks, keys: ApiKeys | ApiKeyFile, route: Route, **path: str) -> Response:
    """Check the request of Flask's context, and perform its operation."""
    kind, _, presented = request.headers.get("Authorization", "").partition(" ")
    key = keys.find(presented.strip()) if kind.lower() == "bearer" else None
    if key is None:
        said = "The header Authorization has no known API key: send 'Bearer dtk_…'."
        raise exceptions.Unauthorized(said, www_authenticate=WWWAuthenticate("bearer"))
    refusal = exceptions.Forbidden(
        f"The scopes of this API key do not allow it: {route.name} requires {route.requires}."
    )
    is_for_all = route.operation.who in key.rights
    if not is_for_all and not (key.tags and route.is_of_tag):
        raise refusal
    given = _body(route) if route.has_body else _query(route)
    check_value(given, route.schema, "the body" if route.has_body else "the query")
    values = {name: route.parameters[name].read(value) for name, value in given.items()}
    if path:
        values["task"] = path["id"]
    once = _idempotency_key(route)
    if not is_for_all and not _covers(delays, key, values):
        raise refusal
    if route.takes_idempotency_key:
        _check_new(delays, key, values, once)
    if once is None:
        return _json(document_of(route.operation.call(delays, **values)))
    return _json(_scheduled_once(delays, route, values, [key.name, once]).as_json())


def _covers(delays: DelayTasks, key: ApiKey, values: Mapping[str, Any]) -> bool:
    """Return whether the scopes of a key cover the tag that a request concerns.

    If the caller's scopes do not cover the tag of the task in the path, the error is that of a
    missing task, so that callers cannot find out which ids exist.
    """
    if "task" not in values:
        return key.covers(values.get("tag", CALLBACK))
    with suppress(TaskNotFoundError):
        if key.covers(delays.get(values["task"]).tag):
            return True
    raise TaskNotFoundError(f"no task that this API key may see has the id {values['task']}")


def _check_new(
    delays: DelayTasks, caller: ApiKey, values: Mapping[str, Any], once: str | None
) -> None:
    """Refuse a new task with a tag, a key or a queue that a request may not choose."""
    tag, key, queue = (values.get(name) for name in ("tag", "key", "queue"))
    if tag is not None and tag.startswith((OWN_PREFIX, CELERY_PREFIX)):
        problem = f"tasks of the tag {tag!r} are not scheduled by this route"
        raise InvalidInputError(problem, "tag")
    if key is not None and key.startswith(IDEMPOTENCY_START):
        raise InvalidInputError(f"keys that start with {IDEMPOTENCY_START!r} are reserved", "key")
    if key is not None and once is not None:
        raise InvalidInputError(
            f"a request has a key or the header {IDEMPOTENCY.name}: with a key, on_conflict: keep "
            "returns the task of an earlier request",
            "key",
        )
    # No worker serves a queue that a caller has invented, and each queue costs a query.
    known = {delays.settings.default_queue, *delays.settings.queues.values()}
    if queue is not None and queue not in known and not caller.may_name(queue):
        raise exceptions.Forbidden(
            f"The setting queues does not name the queue {shown(queue)}, and no scope "
            "queue:PATTERN of this API key matches it."
        )


def _query(route: Route) -> dict[str, Any]:
    types = {name: each.schema.get("type") for name, each in route.parameters.items()}
    return {name: _converted(texts, types.get(name)) for name, texts in request.args.lists()}


def _converted(texts: list[str], kind: object) -> Any:
    """Return the value of a query parameter; a text that is not of the type stays as it is."""
    if len(texts) > 1 or kind == "array":
        return texts
    if kind in ("boolean", "integer"):
        with suppress(ValueError, RecursionError):
            return json.loads(texts[0])
    return texts[0]


def _body(route: Route) -> Any:
    if request.args:
        name = next(iter(request.args))
        raise InvalidInputError(f"{route.name} has no query: send {shown(name)} in the body", name)
    data = _data()
    if not data and not route.needs_body:
        return {}
    if request.mimetype != "application/json":
        said = "The body is JSON: send Content-Type: application/json."
        raise exceptions.UnsupportedMediaType(said)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}", "body") from None


def _data() -> bytes:
    """Return the body, which has no length if the client sends it in chunks."""
    if "Transfer-Encoding" in request.headers and "wsgi.input_terminated" not in request.environ:
        # Werkzeug would read an empty body.
        said = "This server does not read chunks: send Content-Length."
        raise exceptions.LengthRequired(said)
    data = request.get_data(cache=False)
    if request.content_length is None:
        request.stream.read(1)  # raises 413 if the limit has cut the body off
    return data


def _idempotency_key(route: Route) -> str | None:
    """Return the header, which routes that schedule nothing ignore."""
    found = request.headers.get(IDEMPOTENCY.name) if route.takes_idempotency_key else None
    if found is not None:
        check_value(found, IDEMPOTENCY.schema, f"the header {IDEMPOTENCY.name}")
    return found


# -- errors ---------------------------------------------------------------------------------------


def failed(error: Exception) -> Any:
    """Return the response for an error. A bug is in the log only: its text may have secrets."""
    status = next((code for kind, code in STATUS_OF_ERROR if isinstance(error, kind)), None)
    more = dict[str, Any]()
    if isinstance(error, exceptions.HTTPException):
        response = error.get_response()  # with headers such as Allow
        kind, title, detail = "about:blank", error.name, error.description or error.name
    elif status is None:
        logger.error("HTTP API: a request failed", exc_info=error)
        said = "The request failed. The log of the server has the traceback."
        return failed(exceptions.InternalServerError(said))
    else:
        name, detail = type(error).__name__, str(error)
        kind, title = f"urn:delaytasks:{name}", name.removesuffix("Error")
        if isinstance(error, InvalidInputError):
            more["argument"] = error.argument
            status = 413 if error.is_too_large else status
        if (id := getattr(error, "id", None)) is not None:
            more["id"] = str(id)
        response = Response(status=status)
        if status in (503, 504):
            response.headers["Retry-After"] = str(REPEAT_AFTER_S)
    problem = {"type": kind, "title": title, "detail": detail, "status": response.status_code}
    response.data, response.content_type = json.dumps({**problem, **more}), PROBLEM_TYPE
    return response


# -- requests with an Idempotency-Key --------------------------------------------------------------

#: The keys of tasks that were scheduled with an Idempotency-Key. No request may name such a key,
#: because its task would answer requests of another caller.
IDEMPOTENCY_START = "idempotency:"


class _ScheduledBeforeError(Exception):
    """Rolls the transaction of a repeated request back."""

    def __init__(self, task: DelayedTask) -> None:
        super().__init__(task.id)
        self.task = task


def _scheduled_once(
    delays: DelayTasks, route: Route, values: Mapping[str, Any], caller: list[str]
) -> DelayedTask:
    """Schedule a task, unless a request with the same Idempotency-Key has scheduled it.

    The task's key is a hash of the names of the API key and of the Idempotency-Key. Of several
    simultaneous requests, one inserts its row and the others return that row.
    """
    digest = hashlib.sha256(json.dumps(caller).encode(errors="surrogatepass")).hexdigest()
    named = {"tag": values.get("tag", CALLBACK), "key": IDEMPOTENCY_START + digest[:32]}
    options = {**values, "key": named["key"], "on_conflict": "keep"}

    def insert(on: Any) -> DelayedTask:
        task: DelayedTask = route.operation.call(delays, **options, session=on)
        # A row keeps its key when it ends, but no unique key prevents this insert then. The look
        # comes after the insert, because from then on the key of this row prevents others.
        found = delays.find(**named, limit=2, session=on)
        before = next((each for each in found if each.id != task.id), None)
        if before is not None:
            raise _ScheduledBeforeError(before)
        return task

    try:
        task = runtime_of(delays).store.database.transaction(insert)
    except _ScheduledBeforeError as before:
        task = before.task
    body = values.get("body")
    if "url" in values:
        body = {"url": values["url"], "body": body, "headers": values.get("headers", {})}
    if task.body != body:
        said = "Another request was made with this Idempotency-Key: use a new one."
        raise exceptions.UnprocessableEntity(said)
    return task


# -- the WSGI application --------------------------------------------------------------------------

#: Bytes of the longest request.
MOST_REQUEST_BYTES = 4 * 1024 * 1024
#: The version of the API. Each path begins with its first number.
API_VERSION = "1.0.0"
#: The route of the document itself, which needs no API key.
DOCUMENT_PATH = "/v1/openapi.json"
RESPONSE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def make_api(delays: DelayTasks, keys: ApiKeys | ApiKeyFile) -> Flask:
    """Return the HTTP API of `delays` as a WSGI application.

    Parameters
    ----------
    delays
        The `DelayTasks` whose tasks callers schedule, read and change.
    keys
        The API keys: an `ApiKeyFile`, or `ApiKeys`.

    Returns
    -------
    flask.Flask
        The application. It can be mounted at any path.

    Examples
    --------
    >>> api = make_api(delays, ApiKeyFile(Path("api-keys.json")))
    """
    app = Flask(__name__, static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=MOST_REQUEST_BYTES, PROVIDE_AUTOMATIC_OPTIONS=False)
    app.url_map.merge_slashes = False
    for route in ROUTES:
        rule, perform = route.path.replace("{id}", "<id>"), partial(_perform, delays, keys, route)
        app.add_url_rule(rule, route.name, perform, methods=[route.method])
    app.add_url_rule(DOCUMENT_PATH, "document", openapi_document)
    add_probes(app, delays)
    app.after_request(_with_headers)
    app.register_error_handler(Exception, failed)
    return app


def _json(document: Any) -> Response:
    # Python's JSON keeps integers of any size exactly.
    return Response(json.dumps(document, allow_nan=False), content_type="application/json")


def _with_headers(response: Response) -> Response:
    response.headers.update(RESPONSE_HEADERS)
    return response


# -- the OpenAPI document -------------------------------------------------------------------------


def openapi_document() -> Response:
    """Return the document. Its paths begin where the application is mounted."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    security = {"apiKey": {"type": "http", "scheme": "bearer"}}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Delayed tasks", "version": API_VERSION},
        "servers": [{"url": request.script_root or "/"}],
        "security": [{"apiKey": []}],
        "paths": paths,
        "components": {"schemas": COMPONENTS, "securitySchemes": security},
    }
    return _json(document)


def _operation(route: Route) -> dict[str, Any]:
    placed = [] if route.has_body else [(each, "query") for each in route.parameters.values()]
    if route.takes_idempotency_key:
        placed.append((IDEMPOTENCY, "header"))
    id = {"name": "id", "in": "path", "required": True, "schema": TASK_ID.schema}
    parameters: list[Any] = [id] if "{id}" in route.path else []
    parameters += ({"name": each.name, "in": at, "schema": each.schema} for each, at in placed)
    operation = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"Requires {route.requires}.",
        "parameters": parameters,
        "responses": {
            "200": _response("Done", "application/json", route.operation.reply),
            "default": _response("An error", PROBLEM_TYPE, "Problem"),
        },
    }
    if route.has_body:
        body = {"application/json": {"schema": route.schema}}
        operation["requestBody"] = {"required": route.needs_body, "content": body}
    return operation


def _response(description: str, media_type: str, component: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{component}"}
    return {"description": description, "content": {media_type: {"schema": schema}}}
