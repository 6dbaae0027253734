"""Errors as problem documents (RFC 9457)."""

from __future__ import annotations

import json
import logging
import math
from http import HTTPStatus
from typing import Any

from flask import Response
from werkzeug.exceptions import HTTPException

from delaytasks.core.errors import (
    BodyTooLargeError,
    DelayTaskError,
    InvalidInputError,
    OutcomeUnknownError,
    RecurringNotFoundError,
    StoreError,
    TaskNotFoundError,
    TaskStateError,
)

logger = logging.getLogger(__name__)
#: The status of each error. The first class that matches decides.
STATUS_OF_ERROR: tuple[tuple[type[DelayTaskError], int], ...] = (
    (BodyTooLargeError, 413),
    (InvalidInputError, 400),
    (TaskNotFoundError, 404),
    (RecurringNotFoundError, 404),
    (TaskStateError, 409),
    (OutcomeUnknownError, 504),
    (StoreError, 503),
)
#: The media type of these documents.
PROBLEM_TYPE = "application/problem+json"
#: Seconds after which a caller may repeat a request that the database could not serve.
REPEAT_AFTER_S = 5


class RefusedRequestError(Exception):
    """A request that is refused before it reaches delaytasks."""

    def __init__(self, status: int, detail: str, wait_s: float = 0.0, challenge: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.wait_s = wait_s
        self.headers = {"WWW-Authenticate": challenge} if challenge else {}


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
