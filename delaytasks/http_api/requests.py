"""Checks before the function of a route is called, and errors as problem documents (RFC 9457).

The checks are of the key, its limits and permissions, and the schemas.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from http import HTTPStatus
from typing import Any, NamedTuple

from flask import Request, Response
from werkzeug.exceptions import HTTPException

from delaytasks.client import DelayTasks
from delaytasks.core.errors import (
    BodyNotJSONError,
    BodyTooLargeError,
    DelayTaskError,
    InvalidInputError,
    InvalidQueryError,
    OutcomeUnknownError,
    StoreError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.core.text import shown
from delaytasks.http_api.api_keys import ApiKey, FindsKeys, RequestLimit, Scopes
from delaytasks.http_api.schemas import InvalidRequestError, JSONSchema, check_value

logger = logging.getLogger(__name__)
#: The status of each error. The first class that matches decides.
STATUS_OF_ERROR: tuple[tuple[type[DelayTaskError], int], ...] = (
    (BodyTooLargeError, 413),
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
_FRACTION = re.compile(r"\.(\d+)")


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
    OPERATE = "the scope operate"
    SCHEDULE = "a scope schedule:PATTERN that matches the tag"
    READ_TASK = "the scope read, or a scope schedule:PATTERN that matches the tag"
    CHANGE_TASK = "the scope operate, or a scope schedule:PATTERN that matches the tag"

    def is_for_all_tags(self, scopes: Scopes) -> bool:
        """Return whether the scopes allow the route whatever the tag is."""
        if self in (Permission.READ, Permission.READ_TASK):
            return scopes.can_read
        return scopes.can_operate and self is not Permission.SCHEDULE

    @property
    def depends_on_tag(self) -> bool:
        return self not in (Permission.READ, Permission.OPERATE)


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


class Route(NamedTuple):
    """One operation of the API."""

    name: str
    method: str
    #: As in OpenAPI, for example `/v1/tasks/{id}`.
    path: str
    summary: str
    permission: Permission
    function: Callable[[ApiRequest], Reply]
    #: The name of the response's schema in `COMPONENTS`.
    reply: str
    #: The schema of the body; None for a route without a body.
    request: JSONSchema | None = None
    query: Mapping[str, JSONSchema] = {}
    #: Returns the tags that a request concerns, if the permission depends on the tag.
    tags_of: Callable[[ApiRequest], list[str]] = lambda request: []
    #: Without it, a request with the header is refused, since its repetition would not be detected.
    takes_idempotency_key: bool = False


class Gate:
    """Admits requests to their routes."""

    def __init__(self, delays: DelayTasks, keys: FindsKeys, limit: RequestLimit) -> None:
        self._delays = delays
        self._keys = keys
        self._limit = limit

    def admit(self, route: Route, path: Mapping[str, str], http: Request) -> ApiRequest:
        """Return the checked request, or raise the error that refuses it."""
        key = self._key_of(http)
        wait_s = self._limit.wait_s(key.name)
        if wait_s:
            raise RefusedRequestError(429, "This API key makes too many requests.", wait_s)
        is_for_all = route.permission.is_for_all_tags(key.scopes)
        if not is_for_all and not (route.permission.depends_on_tag and key.scopes.patterns):
            raise _forbidden(route)
        request = ApiRequest(
            self._delays,
            key,
            path,
            _query(route, http),
            _body(route, http),
            _idempotency_key(route, http),
        )
        if not is_for_all and not all(map(key.scopes.covers, route.tags_of(request))):
            raise _forbidden(route)
        return request

    def _key_of(self, http: Request) -> ApiKey:
        kind, _, presented = http.headers.get("Authorization", "").partition(" ")
        key = self._keys.find(presented.strip()) if kind.lower() == "bearer" else None
        if key is None:
            raise RefusedRequestError(
                401,
                "The header Authorization has no known API key: send 'Bearer dtk_…'.",
                challenge="Bearer",
            )
        return key


def _forbidden(route: Route) -> RefusedRequestError:
    return RefusedRequestError(
        403,
        f"The scopes of this API key do not allow it: {route.name} requires "
        f"{route.permission.value}.",
    )


def tags_of_visible_task(request: ApiRequest) -> list[str]:
    """Return the tag of the task in the path.

    If the caller's scopes do not cover the tag, the error is that of a missing task, so that
    callers cannot find out which ids exist.
    """
    id = request.path["id"]
    try:
        tag = request.delays.get(id).tag
    except TaskNotFoundError:
        tag = None
    if tag is None or not request.key.scopes.covers(tag):
        raise TaskNotFoundError(f"no task that this API key may see has the id {id}")
    return [tag]


def instant_of(text: str) -> datetime:
    """Return the instant of an RFC 3339 text."""
    exact = _FRACTION.sub(lambda found: "." + found[1][:6].ljust(6, "0"), text.upper(), count=1)
    try:
        return datetime.fromisoformat(exact.replace("Z", "+00:00"))
    except ValueError:
        raise InvalidQueryError(
            f"{shown(text)} is not an instant: write 2026-11-25T03:00:00Z"
        ) from None


# -- the parts of a request -----------------------------------------------------------------------


def _query(route: Route, http: Request) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, texts in http.args.lists():
        schema = route.query.get(name)
        if schema is None:
            known = ", ".join(route.query) or "none"
            raise InvalidRequestError(f"unknown query parameter {shown(name)} (known: {known})")
        if schema.get("type") == "array":
            found[name] = texts
        elif len(texts) == 1:
            found[name] = _converted(texts[0], schema.get("type"))
        else:
            raise InvalidRequestError(f"the query parameter {name} is given several times")
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
        raise BodyNotJSONError(f"the body is not JSON: {error}") from None
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
        raise InvalidRequestError(
            f"{route.name} does not take the header {IDEMPOTENCY_HEADER}: a repeated request would "
            "be carried out again; leave it out"
        )
    if not 1 <= len(found) <= IDEMPOTENCY_LENGTH:
        raise InvalidRequestError(
            f"the {IDEMPOTENCY_HEADER} has 1 to {IDEMPOTENCY_LENGTH} characters"
        )
    return found


# -- errors ---------------------------------------------------------------------------------------


def refused(error: RefusedRequestError) -> Response:
    return _problem(error.status, str(error), wait_s=error.wait_s, headers=error.headers)


def failed(error: DelayTaskError) -> Response:
    """Return the response for an error of delaytasks."""
    status = next((code for kind, code in STATUS_OF_ERROR if isinstance(error, kind)), None)
    if status is None:
        return broken(error)
    id = getattr(error, "id", None)
    return _problem(
        status,
        str(error),
        name=type(error).__name__,
        wait_s=REPEAT_AFTER_S if status in (503, 504) else 0,
        more={} if id is None else {"id": str(id)},
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
