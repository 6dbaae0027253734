"""The OpenAPI 3.1 document, made from the table of routes."""

from __future__ import annotations

import re
from typing import Any

from delaytasks.http_api import schemas
from delaytasks.http_api.problems import PROBLEM_TYPE
from delaytasks.http_api.requests import IDEMPOTENCY_HEADER, IDEMPOTENCY_LENGTH, Route
from delaytasks.http_api.routes import ROUTES

#: The version of the API. Each path begins with its first number.
API_VERSION = "1.0.0"
#: The route of the document itself, which needs no API key.
DOCUMENT_PATH = "/v1/openapi.json"
_PATH_SCHEMAS = {"id": schemas.TASK_ID, "name": schemas.SCHEDULE_NAME}


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
    found = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
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
