"""The HTTP API: its application, its routes, and how a request is read and answered.

The application and the OpenAPI document are made from the table.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

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
from delaytasks.model.inputs import CALLBACK, CELERY_PREFIX, parse_duration, parse_instant
from delaytasks.model.task import CancelResult, DelayedTask, NewTask, OnConflict, TouchResult
from delaytasks.model.text import needs_extra, shown
from delaytasks.operate.access import TokenBuckets
from delaytasks.operate.health import HealthChecks, Probes
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


class Permission(Enum):
    """The permission that a route requires. Each value names the scopes that grant it."""

    READ = "the scope read"
    SCHEDULE = "a scope schedule:PATTERN that matches the tag"
    READ_TASK = "the scope read, or a scope schedule:PATTERN that matches the tag"
    CHANGE_TASK = "the scope operate, or a scope schedule:PATTERN that matches the tag"

    def is_for_all_tags(self, scopes: Scopes) -> bool:
        """Return whether the scopes allow the route whatever the tag is."""
        if self in (Permission.READ, Permission.READ_TASK):
            return scopes.can_read
        return scopes.can_operate and self is not Permission.SCHEDULE


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request of a known caller, whose values match the schemas of its route."""

    delays: DelayTasks
    key: ApiKey
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any
    idempotency_key: str | None


#: The document of a response.
Reply = dict[str, Any]
Function = Callable[[ApiRequest], Reply]


class Route(NamedTuple):
    """One operation of the API."""

    name: str
    method: str
    #: As in OpenAPI, for example `/v1/tasks/{id}`.
    path: str
    summary: str
    permission: Permission
    function: Function
    #: The name of the response's schema in `COMPONENTS`.
    reply: str
    #: The schema of the body; None for a route without a body.
    request: JSONSchema | None
    query: Mapping[str, JSONSchema]

    @property
    def takes_idempotency_key(self) -> bool:
        """Whether repetitions are detected. Other routes refuse a request with the header."""
        return self.permission is Permission.SCHEDULE


#: The table of the operations, in the order of the document. `_route` fills it.
ROUTES: list[Route] = []


def _route(
    operation: str,
    permission: Permission,
    reply: str,
    request: JSONSchema | None = None,
    query: Mapping[str, JSONSchema] | None = None,
) -> Callable[[Function], Function]:
    """Add a function to the table. Its docstring is the summary, and its name that of the route."""
    method, path = operation.split()

    def add(function: Function) -> Function:
        first, *others = function.__name__.split("_")
        name = first + "".join(map(str.title, others))
        summary = (function.__doc__ or "").removesuffix(".")
        ROUTES.append(
            Route(name, method, path, summary, permission, function, reply, request, query or {})
        )
        return function

    return add


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
    is_for_all = route.permission.is_for_all_tags(key.scopes)
    has_patterns = bool(key.scopes.patterns) and route.permission is not Permission.READ
    if not is_for_all and not has_patterns:
        raise _forbidden(route)
    query, body = _query(route, request), _body(route, request)
    found = ApiRequest(delays, key, path, query, body, _idempotency_key(route, request))
    if not is_for_all and not key.scopes.covers(_tag_of(found)):
        raise _forbidden(route)
    return found


def _forbidden(route: Route) -> RefusedRequestError:
    return RefusedRequestError(
        403,
        f"The scopes of this API key do not allow it: {route.name} requires "
        f"{route.permission.value}.",
    )


def _tag_of(request: ApiRequest) -> str:
    """Return the tag that a request concerns.

    If the caller's scopes do not cover the tag of the task in the path, the error is that of a
    missing task, so that callers cannot find out which ids exist.
    """
    if "id" not in request.path:
        return str(request.body.get("tag", CALLBACK))
    id = request.path["id"]
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
    for name, texts in http.args.lists():
        schema = route.query.get(name)
        if schema is None:
            known = ", ".join(route.query) or "none"
            raise InvalidInputError(f"unknown query parameter {shown(name)} (known: {known})", name)
        if schema.get("type") == "array":
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


def _body(route: Route, http: Request) -> Any:
    if route.request is None:
        return None
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
    return body


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

# -- schedule -------------------------------------------------------------------------------------


@_route("POST /v1/tasks", Permission.SCHEDULE, "Task", schemas.NEW_TASK)
def schedule_task(request: ApiRequest) -> Reply:
    """Schedule a task."""
    return _scheduled(request, *_new_task(request.body))


@_route("POST /v1/callbacks", Permission.SCHEDULE, "Task", schemas.NEW_CALLBACK)
def schedule_callback(request: ApiRequest) -> Reply:
    """Schedule a POST to a URL."""
    options = dict(request.body)
    url, body, headers = options.pop("url"), options.pop("body", None), options.pop("headers", None)
    content = runtime_of(request.delays).http_callbacks.content(url, body, headers)
    return _scheduled(request, *_task_of({**options, "tag": CALLBACK, "body": content}))


def _new_task(item: Mapping[str, Any]) -> tuple[NewTask, OnConflict]:
    """Return the task that a request describes, and the rule for its key."""
    tag = item["tag"]
    if tag.startswith((OWN_PREFIX, CELERY_PREFIX)):
        raise InvalidInputError(f"tasks of the tag {tag!r} are not scheduled by this route", "tag")
    return _task_of(dict(item))


def _task_of(options: dict[str, Any]) -> tuple[NewTask, OnConflict]:
    on_conflict: OnConflict = options.pop("on_conflict", "reject")
    if (options.get("key") or "").startswith(IDEMPOTENCY_START):
        raise InvalidInputError(f"keys that start with {IDEMPOTENCY_START!r} are reserved", "key")
    at = options.pop("at", None)
    new = NewTask(at=None if at is None else parse_instant(at), **{"body": None, **options})
    return new, on_conflict


class _ScheduledBeforeError(Exception):
    """Rolls the transaction of a repeated request back."""

    def __init__(self, task: DelayedTask) -> None:
        super().__init__(task.id)
        self.task = task


def _schedule_once(request: ApiRequest, new: NewTask) -> DelayedTask:
    """Schedule a task, unless a request with the same Idempotency-Key has scheduled it.

    The task's key is a hash of the names of the API key and of the Idempotency-Key. Of several
    simultaneous requests, one inserts its row and the others return that row.
    """
    caller = json.dumps([request.key.name, request.idempotency_key])
    digest = hashlib.sha256(caller.encode(errors="surrogatepass")).hexdigest()
    new = new._replace(key=IDEMPOTENCY_START + digest[:32])
    runtime = runtime_of(request.delays)

    def insert(on: Any) -> DelayedTask:
        task = runtime.producer.schedule(new, "keep", runtime.transactions.of(on))
        # A row keeps its key when it ends, but no unique key prevents this insert then. The look
        # comes after the insert, because from then on the key of this row prevents others.
        found = request.delays.find(tag=new.tag, key=new.key, limit=2, session=on)
        before = next((each for each in found if each.id != task.id), None)
        if before is not None:
            raise _ScheduledBeforeError(before)
        return task

    try:
        task = runtime.store.database.transaction(insert)
    except _ScheduledBeforeError as before:
        task = before.task
    except SessionUnusableError:
        # MariaDB ends a transaction that waits for the lock of a simultaneous request too long.
        found = request.delays.find(tag=new.tag, key=new.key, limit=1)
        if not found.tasks:
            raise
        task = found.tasks[0]
    if task.body != new.body:
        raise RefusedRequestError(
            422, "Another request was made with this Idempotency-Key: use a new one."
        )
    return task


def _scheduled(request: ApiRequest, new: NewTask, on_conflict: OnConflict) -> Reply:
    if request.idempotency_key is None:
        runtime = runtime_of(request.delays)
        return runtime.producer.schedule(new, on_conflict, runtime.transactions.of(None)).as_json()
    if new.key is not None:
        raise InvalidInputError(
            "a request has a key or the header Idempotency-Key: with a key, on_conflict: keep "
            "returns the task of an earlier request",
            "key",
        )
    return _schedule_once(request, new).as_json()


# -- read and change ------------------------------------------------------------------------------

_TIMES = ("since", "until", "created_since", "created_until", "updated_until")


@_route("GET /v1/tasks", Permission.READ, "TaskPage", query=schemas.FIND_PARAMETERS)
def find_tasks(request: ApiRequest) -> Reply:
    """Find tasks, in the order of their due times."""
    filters = dict(request.query)
    for name in _TIMES:
        if name in filters:
            filters[name] = parse_instant(filters[name], name)
    if "meta" in filters:
        filters["meta"] = dict(pair.split("=", 1) for pair in filters["meta"])
    page = request.delays.find(**filters)
    return {"tasks": [task.as_json() for task in page], "cursor": page.cursor}


@_route("GET /v1/tasks/{id}", Permission.READ_TASK, "Task")
def get_task(request: ApiRequest) -> Reply:
    """Read a task."""
    return request.delays.get(request.path["id"]).as_json()


@_route("GET /v1/tasks/{id}/attempts", Permission.READ_TASK, "Attempts")
def get_attempts(request: ApiRequest) -> Reply:
    """Read the failed attempts of a task."""
    task = request.delays.get(request.path["id"], attempts=True)
    return {"attempts": [attempt.as_json() for attempt in task.attempts]}


@_route("POST /v1/tasks/{id}/cancel", Permission.CHANGE_TASK, "CancelResult", schemas.CANCEL_TASK)
def cancel_task(request: ApiRequest) -> Reply:
    """Cancel a task."""
    return _cancelled(request.delays.cancel(request.path["id"], **request.body))


@_route("POST /v1/tasks/{id}/reschedule", Permission.CHANGE_TASK, "Task", schemas.RESCHEDULE_TASK)
def reschedule_task(request: ApiRequest) -> Reply:
    """Give a waiting task a due time."""
    return request.delays.reschedule(request.path["id"], **_due(request)).as_json()


@_route("POST /v1/tasks/{id}/touch", Permission.CHANGE_TASK, "TouchResult", schemas.TOUCH_TASK)
def touch_task(request: ApiRequest) -> Reply:
    """Postpone a timeout."""
    return _touched(request.delays.touch(request.path["id"], **request.body))


@_route("POST /v1/tasks/{id}/rerun", Permission.CHANGE_TASK, "Task", schemas.RERUN_TASK)
def rerun_task(request: ApiRequest) -> Reply:
    """Run a failed or cancelled task again."""
    return request.delays.rerun(request.path["id"], **request.body).as_json()


@_route("POST /v1/keys/cancel", Permission.CHANGE_TASK, "CancelResult", schemas.CANCEL_KEY)
def cancel_key(request: ApiRequest) -> Reply:
    """Cancel the live task of a key."""
    return _cancelled(request.delays.cancel(**request.body))


@_route("POST /v1/keys/reschedule", Permission.CHANGE_TASK, "Task", schemas.RESCHEDULE_KEY)
def reschedule_key(request: ApiRequest) -> Reply:
    """Give the live task of a key a due time."""
    return request.delays.reschedule(**_due(request)).as_json()


@_route("POST /v1/keys/touch", Permission.CHANGE_TASK, "TouchResult", schemas.TOUCH_KEYS)
def touch_keys(request: ApiRequest) -> Reply:
    """Postpone the timeouts of many keys."""
    body = dict(request.body)
    return _touched(request.delays.touch(key=body.pop("keys"), **body))


@_route("GET /v1/statistics", Permission.READ, "Statistics", query=schemas.STATISTICS_PARAMETERS)
def get_statistics(request: ApiRequest) -> Reply:
    """Read counts of ended tasks."""
    totals = request.delays.statistics.totals(
        since=_since(request.query.get("since", "1h")), tags=request.query.get("tag")
    )
    return {"tags": {tag: total.as_json() for tag, total in totals.items()}}


def _due(request: ApiRequest) -> dict[str, Any]:
    body = dict(request.body)
    return {**body, "at": parse_instant(body["at"])} if "at" in body else body


def _since(text: str) -> Any:
    try:
        parse_duration(text)
        return text
    except InvalidInputError:
        return parse_instant(text, "since")


def _cancelled(result: CancelResult) -> Reply:
    return {
        "is_cancelled": result.is_cancelled,
        "is_requested": result.is_requested,
        "reason": result.reason,
        "id": None if result.id is None else str(result.id),
        "status": None if result.status is None else result.status.name,
    }


def _touched(result: TouchResult) -> Reply:
    return {"touched": [*map(str, result.touched)], "gone": [*map(str, result.gone)]}


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
        return _json(route.function(admitted(route, path)))

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
        "description": f"Requires {route.permission.value}.",
        "parameters": _parameters(route),
        "responses": {
            "200": _response("Done", "application/json", route.reply),
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
        found.append({"name": "id", "in": "path", "required": True, "schema": schemas.TASK_ID})
    found += [{"name": name, "in": "query", "schema": each} for name, each in route.query.items()]
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
