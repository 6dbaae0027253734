"""Makes the WSGI application of the HTTP API, and its OpenAPI 3.1 document."""

from __future__ import annotations

import json
from typing import Any

from delaytasks.client import DelayTasks
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.text import needs_extra

with needs_extra("api", "the HTTP API"):
    from flask import Flask, Response, request
    from werkzeug.exceptions import HTTPException

from delaytasks.http_api import requests, schemas
from delaytasks.http_api.api_keys import FindsKeys, RequestLimit
from delaytasks.http_api.requests import Gate, Route
from delaytasks.http_api.routes import ROUTES
from delaytasks.operations.health import HealthChecks
from delaytasks.operations.probes import Probes
from delaytasks.runtime import runtime_of

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
    app = Flask(__name__, static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=most_bytes, PROVIDE_AUTOMATIC_OPTIONS=False)
    app.url_map.merge_slashes = False
    gate = Gate(delays, keys, RequestLimit(requests_per_s))
    for route in ROUTES:
        _add(app, gate, route)
    app.add_url_rule(DOCUMENT_PATH, view_func=_document)
    Probes(lambda: HealthChecks(runtime_of(delays).store, delays.settings)).add_to(app)
    app.after_request(_with_headers)
    app.register_error_handler(requests.RefusedRequestError, requests.refused)
    app.register_error_handler(DelayTaskError, requests.failed)
    app.register_error_handler(HTTPException, requests.of_http)
    app.register_error_handler(Exception, requests.broken)
    return app


def _add(app: Flask, gate: Gate, route: Route) -> None:
    def view(**path: str) -> Response:
        return _json(route.function(gate.admit(route, path, request)))

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
            "default": _response("An error", requests.PROBLEM_TYPE, "Problem"),
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
        schema = {"type": "string", "minLength": 1, "maxLength": requests.IDEMPOTENCY_LENGTH}
        found.append(
            {
                "name": requests.IDEMPOTENCY_HEADER,
                "in": "header",
                "description": "A request that is repeated with this key schedules nothing more.",
                "schema": schema,
            }
        )
    return found


def _response(description: str, media_type: str, component: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{component}"}
    return {"description": description, "content": {media_type: {"schema": schema}}}
