"""Makes the WSGI application of the HTTP API."""

from __future__ import annotations

import json
from typing import Any

from delaytasks.client import DelayTasks
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.installed import needs_extra

with needs_extra("api", "the HTTP API"):
    from flask import Flask, Response, request
    from werkzeug.exceptions import HTTPException

from delaytasks.http_api import problems
from delaytasks.http_api.api_keys import FindsKeys
from delaytasks.http_api.openapi import DOCUMENT_PATH, openapi_document
from delaytasks.http_api.request_limit import RequestLimit
from delaytasks.http_api.requests import Gate, Route
from delaytasks.http_api.routes import ROUTES
from delaytasks.operations.health import HealthChecks
from delaytasks.operations.probes import Probes
from delaytasks.wiring import wiring_of

#: Bytes of the longest request, and the requests of a key in a second, by default.
MOST_REQUEST_BYTES, REQUESTS_PER_S = 4 * 1024 * 1024, 100.0
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
    Probes(lambda: HealthChecks(wiring_of(delays).shards, delays.settings)).add_to(app)
    app.after_request(_with_headers)
    app.register_error_handler(problems.RefusedRequestError, problems.refused)
    app.register_error_handler(DelayTaskError, problems.failed)
    app.register_error_handler(HTTPException, problems.of_http)
    app.register_error_handler(Exception, problems.broken)
    return app


def _add(app: Flask, gate: Gate, route: Route) -> None:
    def view(**path: str) -> Response:
        return _json(route.function(gate.admit(route, path, request)))

    # The name of a schedule may contain slashes.
    rule = route.path.replace("{name}", "<path:name>").replace("{id}", "<id>")
    app.add_url_rule(rule, route.name, view, methods=[route.method])


def _document() -> Response:
    return _json(openapi_document(request.script_root or "/"))


def _json(document: Any) -> Response:
    # Python's JSON keeps integers of any size exactly.
    return Response(json.dumps(document, allow_nan=False), content_type="application/json")


def _with_headers(response: Response) -> Response:
    response.headers.update(RESPONSE_HEADERS)
    return response
