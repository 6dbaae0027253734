"""The HTTP API: its application, its routes, and how a request is read and answered.

The application and the OpenAPI document are made from the table.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from http import HTTPStatus
from typing import Any

from delaytasks.client import DelayTasks
from delaytasks.http_api import schemas
from delaytasks.http_api.api_keys import OWN_PREFIX, ApiKey, FindsKeys, Scopes
from delaytasks.http_api.schemas import JSONSchema, check_value
from delaytasks.model.errors import (
    ConfigError,
    DelayTaskError,
    InvalidInputError,
    OutcomeUnknownError,
    SessionUnusableError,
    StoreError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.model.inputs import CALLBACK, CELERY_PREFIX
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import needs_extra, shown
from delaytasks.operate.access import TokenBuckets
from delaytasks.operate.health import HealthChecks, Probes
from delaytasks.operate.operations import (
    KEY,
    OPERATIONS,
    TAG,
    TASK_ID,
    Operation,
    Parameter,
    document_of,
)
from delaytasks.runtime import runtime_of

with needs_extra("api", "the HTTP API"):
    from flask import Flask, Request, Response, request
    from werkzeug.exceptions import HTTPException


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

IDEMPOTENCY_HEADER = "Idempotency-Key"
#: The longest Idempotency-Key.
IDEMPOTENCY_LENGTH = 255


class RefusedRequestError(Exception):
    """A request that is refused before it reaches delaytasks."""

    def __init__(self, status: int, detail: str, wait_s: float = 0.0, challenge: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.wait_s = wait_s
        self.headers = {"WWW-Authenticate": challenge} if challenge else {}


#: What no caller chooses: an id may be that of a hidden task, and a key's name is the actor.
_NOT_OF_CALLERS = ("id", "actor")
_OF_KEY = (replace(TAG, is_required=True), replace(KEY, is_required=True))


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
    def request(self) -> JSONSchema | None:
        """The schema of the body; None for a route without a body. Other names are refused."""
        if self.method == "GET":
            return None
        required = [name for name, each in self.parameters.items() if each.is_required]
        properties = {name: each.schema for name, each in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**schema, "required": required} if required else schema

    @property
    def takes_idempotency_key(self) -> bool:
        """Whether repetitions are detected. Other routes refuse a request with the header."""
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

    def is_for_all_tags(self, scopes: Scopes) -> bool:
        """Return whether the scopes allow the route whatever the tag is."""
        return {"read": scopes.can_read, "operate": scopes.can_operate}.get(
            self.operation.who, False
        )


ROUTES = [
    Route(name, method, path, operation)
    for operation in OPERATIONS.values()
    for name, (method, path) in operation.routes.items()
]


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request of a known caller, whose values match the schemas of its route."""

    delays: DelayTasks
    key: ApiKey
    route: Route
    #: The arguments of the operation.
    values: Mapping[str, Any]
    idempotency_key: str | None


def _admitted(
    delays: DelayTasks, keys: FindsKeys, limit: TokenBuckets, route: Route, path: Mapping[str, str]
) -> ApiRequest:
    """Return the checked request of Flask's context, or raise the error that refuses it."""
    kind, _, presented = request.headers.get("Authorization", "").partition(" ")
    key = keys.find(presented.strip()) if kind.lower() == "bearer" else None
    if key is None:
        said = "The header Authorization has no known API key: send 'Bearer dtk_…'."
        raise RefusedRequestError(401, said, challenge="Bearer")
    if wait_s := limit.take(key.name):
        raise RefusedRequestError(429, "This API key makes too many requests.", wait_s)
    is_for_all = route.is_for_all_tags(key.scopes)
    if not is_for_all and not (key.scopes.patterns and route.is_of_tag):
        raise _forbidden(route)
    given = {**_query(route, request), **_body(route, request)}
    values = {name: route.parameters[name].read(value) for name, value in given.items()}
    if path:
        values["task"] = path["id"]
    found = ApiRequest(delays, key, route, values, _idempotency_key(route, request))
    if not is_for_all and not key.scopes.covers(_tag_of(found)):
        raise _forbidden(route)
    return found


def _forbidden(route: Route) -> RefusedRequestError:
    return RefusedRequestError(
        403, f"The scopes of this API key do not allow it: {route.name} requires {route.requires}."
    )


def _tag_of(request: ApiRequest) -> str:
    """Return the tag that a request concerns.

    If the caller's scopes do not cover the tag of the task in the path, the error is that of a
    missing task, so that callers cannot find out which ids exist.
    """
    if "task" not in request.values:
        return str(request.values.get("tag", CALLBACK))
    id = request.values["task"]
    try:
        tag = request.delays.get(id).tag
    except TaskNotFoundError:
        tag = None
    if tag is None or not request.key.scopes.covers(tag):
        raise TaskNotFoundError(f"no task that this API key may see has the id {id}")
    return tag


# -- the parts of a request -----------------------------------------------------------------------


def _query(route: Route, http: Request) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = route.parameters if route.request is None else {}
    for name, texts in http.args.lists():
        if name not in known:
            names = ", ".join(known) or "none"
            raise InvalidInputError(f"unknown query parameter {shown(name)} (known: {names})", name)
        schema = known[name].schema
        if known[name].is_many:
            found[name] = texts
        elif len(texts) == 1:
            found[name] = _converted(texts[0], schema.get("type"))
        else:
            raise InvalidInputError(f"the query parameter {name} is given several times", name)
        check_value(found[name], schema, f"the query parameter {name}")
    return found


def _converted(text: str, kind: object) -> Any:
    """Return the value of a query parameter; a text that is not of the type stays as it is."""
    if kind == "boolean":
        return {"true": True, "false": False}.get(text, text)
    is_number = kind == "integer" and text.isascii() and text.isdigit() and len(text) < 20
    return int(text) if is_number else text


def _body(route: Route, http: Request) -> dict[str, Any]:
    if route.request is None:
        return {}
    data = _data(http)
    if not data and "required" not in route.request:
        return {}
    if http.mimetype != "application/json":
        raise RefusedRequestError(415, "The body is JSON: send Content-Type: application/json.")
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}", "body") from None
    check_value(body, route.request, "the body")
    return dict(body)


def _data(http: Request) -> bytes:
    """Return the body, which has no length if the client sends it in chunks."""
    if "Transfer-Encoding" in http.headers and "wsgi.input_terminated" not in http.environ:
        # Werkzeug would read an empty body.
        raise RefusedRequestError(411, "This server does not read chunks: send Content-Length.")
    data = http.get_data(cache=False)
    if http.content_length is None:
        http.stream.read(1)  # raises 413 if the limit has cut the body off
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _idempotency_key(route: Route, http: Request) -> str | None:
    found = http.headers.get(IDEMPOTENCY_HEADER)
    if found is None:
        return None
    if not route.takes_idempotency_key:
        raise InvalidInputError(
            f"{route.name} does not take the header {IDEMPOTENCY_HEADER}: a repeated request would "
            "be carried out again; leave it out",
            IDEMPOTENCY_HEADER,
        )
    if not 1 <= len(found) <= IDEMPOTENCY_LENGTH:
        raise InvalidInputError(
            f"the {IDEMPOTENCY_HEADER} has 1 to {IDEMPOTENCY_LENGTH} characters", IDEMPOTENCY_HEADER
        )
    return found


# -- errors ---------------------------------------------------------------------------------------


def refused(error: RefusedRequestError) -> Response:
    return _problem(error.status, str(error), wait_s=error.wait_s, headers=error.headers)


def failed(error: DelayTaskError) -> Response:
    """Return the response for an error of delaytasks."""
    status = next((code for kind, code in STATUS_OF_ERROR if isinstance(error, kind)), None)
    if isinstance(error, InvalidInputError) and error.is_too_large:
        status = 413
    if status is None:
        return broken(error)
    id = getattr(error, "id", None)
    more = {"argument": error.argument} if isinstance(error, InvalidInputError) else {}
    return _problem(
        status,
        str(error),
        name=type(error).__name__,
        wait_s=REPEAT_AFTER_S if status in (503, 504) else 0,
        more=more if id is None else {"id": str(id)},
    )


def of_http(error: HTTPException) -> Response:
    """Return the response for an error of the HTTP layer, such as an unknown path."""
    code = error.code or 500
    allowed = error.get_response().headers.get("Allow")
    headers = {} if allowed is None else {"Allow": allowed}
    return _problem(code, error.description or error.name, headers=headers)


def broken(error: Exception) -> Response:
    """Return the response for a bug. Its text is in the log only, because it may have secrets."""
    logger.error("HTTP API: a request failed", exc_info=error)
    return _problem(500, "The request failed. The log of the server has the traceback.")


def _problem(
    status: int,
    detail: str,
    name: str | None = None,
    wait_s: float = 0.0,
    headers: dict[str, str] | None = None,
    more: dict[str, Any] | None = None,
) -> Response:
    title = HTTPStatus(status).phrase
    document = {
        "type": "about:blank" if name is None else f"urn:delaytasks:{name}",
        "title": title if name is None else name.removesuffix("Error"),
        "status": status,
        "detail": detail,
        **(more or {}),
    }
    response = Response(json.dumps(document), status, headers, content_type=PROBLEM_TYPE)
    if wait_s:
        response.headers["Retry-After"] = str(math.ceil(wait_s))
    return response


#: The keys of tasks that were scheduled with an Idempotency-Key. No request may name such a key,
#: because its task would answer requests of another caller.
IDEMPOTENCY_START = "idempotency:"

# -- perform the operation ------------------------------------------------------------------------


def _performed(request: ApiRequest) -> Any:
    """Return the document of the response."""
    route, values = request.route, request.values
    if route.takes_idempotency_key:
        tag, key = values.get("tag", ""), values.get("key")
        if tag.startswith((OWN_PREFIX, CELERY_PREFIX)):
            problem = f"tasks of the tag {tag!r} are not scheduled by this route"
            raise InvalidInputError(problem, "tag")
        if key is not None and key.startswith(IDEMPOTENCY_START):
            problem = f"keys that start with {IDEMPOTENCY_START!r} are reserved"
            raise InvalidInputError(problem, "key")
        if request.idempotency_key is not None:
            return _scheduled_once(request).as_json()
    return document_of(route.operation.call(request.delays, **values))


class _ScheduledBeforeError(Exception):
    """Rolls the transaction of a repeated request back."""

    def __init__(self, task: DelayedTask) -> None:
        super().__init__(task.id)
        self.task = task


def _scheduled_once(request: ApiRequest) -> DelayedTask:
    """Schedule a task, unless a request with the same Idempotency-Key has scheduled it.

    The task's key is a hash of the names of the API key and of the Idempotency-Key. Of several
    simultaneous requests, one inserts its row and the others return that row.
    """
    values, delays = request.values, request.delays
    if "key" in values:
        raise InvalidInputError(
            "a request has a key or the header Idempotency-Key: with a key, on_conflict: keep "
            "returns the task of an earlier request",
            "key",
        )
    caller = json.dumps([request.key.name, request.idempotency_key])
    digest = hashlib.sha256(caller.encode(errors="surrogatepass")).hexdigest()
    named = {"tag": values.get("tag", CALLBACK), "key": IDEMPOTENCY_START + digest[:32]}
    options = {**values, "key": named["key"], "on_conflict": "keep"}

    def insert(on: Any) -> DelayedTask:
        task: DelayedTask = request.route.operation.call(delays, **options, session=on)
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
    except SessionUnusableError:
        # MariaDB ends a transaction that waits for the lock of a simultaneous request too long.
        found = delays.find(**named, limit=1)
        if not found.tasks:
            raise
        task = found.tasks[0]
    body = values.get("body")
    if "url" in values:
        body = {"url": values["url"], "body": body, "headers": values.get("headers", {})}
    if task.body != body:
        raise RefusedRequestError(
            422, "Another request was made with this Idempotency-Key: use a new one."
        )
    return task


# -- the WSGI application --------------------------------------------------------------------------

#: Bytes of the longest request, and the requests of a key in a second, by default.
MOST_REQUEST_BYTES, REQUESTS_PER_S = 4 * 1024 * 1024, 100.0
#: The version of the API. Each path begins with its first number.
API_VERSION = "1.0.0"
#: The route of the document itself, which needs no API key.
DOCUMENT_PATH = "/v1/openapi.json"
RESPONSE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def make_api(
    delays: DelayTasks,
    keys: FindsKeys,
    *,
    requests_per_s: float = REQUESTS_PER_S,
    most_bytes: int = MOST_REQUEST_BYTES,
) -> Flask:
    """Return the HTTP API of `delays` as a WSGI application.

    Parameters
    ----------
    delays
        The `DelayTasks` whose tasks callers schedule, read and change.
    keys
        The API keys: an `ApiKeyFile`, or `ApiKeys`.
    requests_per_s
        The requests that each key may make in a second, in this process.
    most_bytes
        The bytes of the longest request.

    Returns
    -------
    flask.Flask
        The application. It can be mounted at any path.

    Examples
    --------
    >>> api = make_api(delays, ApiKeyFile(Path("api-keys.json")))
    """
    if not requests_per_s > 0:
        raise ConfigError(f"requests_per_s is more than 0, not {shown(requests_per_s)}")
    app = Flask(__name__, static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=most_bytes, PROVIDE_AUTOMATIC_OPTIONS=False)
    app.url_map.merge_slashes = False
    # After a pause, a key may make the requests of a second at the same time.
    limit = TokenBuckets(requests_per_s, max(requests_per_s, 1.0))
    admitted = partial(_admitted, delays, keys, limit)
    for route in ROUTES:
        _add(app, route, admitted)
    app.add_url_rule(DOCUMENT_PATH, view_func=_document)
    Probes(lambda: HealthChecks(runtime_of(delays).store, delays.settings)).add_to(app)
    app.after_request(_with_headers)
    app.register_error_handler(RefusedRequestError, refused)
    app.register_error_handler(DelayTaskError, failed)
    app.register_error_handler(HTTPException, of_http)
    app.register_error_handler(Exception, broken)
    return app


def _add(app: Flask, route: Route, admitted: Callable[..., ApiRequest]) -> None:
    def view(**path: str) -> Response:
        return _json(_performed(admitted(route, path)))

    app.add_url_rule(route.path.replace("{id}", "<id>"), route.name, view, methods=[route.method])


def _document() -> Response:
    return _json(openapi_document(request.script_root or "/"))


def _json(document: Any) -> Response:
    # Python's JSON keeps integers of any size exactly.
    return Response(json.dumps(document, allow_nan=False), content_type="application/json")


def _with_headers(response: Response) -> Response:
    response.headers.update(RESPONSE_HEADERS)
    return response


# -- the OpenAPI document -------------------------------------------------------------------------


def openapi_document(server: str = "/") -> dict[str, Any]:
    """Return the document.

    Parameters
    ----------
    server
        The URL or the path of the API, without `/v1`.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "delaytasks",
            "version": API_VERSION,
            "description": "Schedule, look up and change delayed tasks.",
        },
        "servers": [{"url": server}],
        "security": [{"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.COMPONENTS,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"Requires {route.requires}.",
        "parameters": _parameters(route),
        "responses": {
            "200": _response("Done", "application/json", route.operation.reply),
            "default": _response("An error", PROBLEM_TYPE, "Problem"),
        },
    }
    if route.request is not None:
        operation["requestBody"] = {
            "required": "required" in route.request,
            "content": {"application/json": {"schema": route.request}},
        }
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "{id}" in route.path:
        found.append({"name": "id", "in": "path", "required": True, "schema": TASK_ID.schema})
    if route.request is None:
        for name, each in route.parameters.items():
            found.append({"name": name, "in": "query", "schema": each.schema})
    if route.takes_idempotency_key:
        schema = {"type": "string", "minLength": 1, "maxLength": IDEMPOTENCY_LENGTH}
        found.append(
            {
                "name": IDEMPOTENCY_HEADER,
                "in": "header",
                "description": "A request that is repeated with this key schedules nothing more.",
                "schema": schema,
            }
        )
    return found


def _response(description: str, media_type: str, component: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{component}"}
    return {"description": description, "content": {media_type: {"schema": schema}}}
