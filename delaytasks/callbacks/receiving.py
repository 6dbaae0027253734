"""The decorator of views that receive callbacks, for Django, Flask, FastAPI and Starlette."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from delaytasks.callbacks.signatures import verify
from delaytasks.model.errors import InvalidInputError

R = TypeVar("R")


def webhook(secrets: str | Iterable[str]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a view so that only signed callbacks reach it.

    The view is one of Django, Flask, FastAPI or Starlette, and may be a coroutine function. Its
    parameter `callback` receives the `Received` with the id and the body of the callback. Requests
    without a valid signature are answered with 401, and bodies that are not JSON with 400. Django
    does not check a CSRF token.

    Parameters
    ----------
    secrets
        The secret, or the secrets while they are rotated, that sign callbacks.

    Returns
    -------
    callable
        The decorator.

    Examples
    --------
    >>> @app.post("/order-closed")
    ... @webhook(SECRET)
    ... def order_closed(callback):
    ...     ship(callback.body["order"])
    """

    known = secrets if isinstance(secrets, str) else tuple(secrets)

    def decorate(view: Callable[..., R]) -> Callable[..., R]:
        def refusal(request: Any, payload: bytes, values: dict[str, Any]) -> Any:
            """Add the callback to the arguments of the view, or return the response."""
            if request.method != "POST":
                return _response(request, 405, "A callback is a POST.")
            try:
                values["callback"] = verify(payload, request.headers, known)
            except InvalidInputError as error:
                return _response(request, 401 if error.argument == "headers" else 400, str(error))
            if "request" not in parameters:
                values.pop("request", None)  # FastAPI gives it to the decorator
            return None

        def receive(*args: Any, **values: Any) -> Any:
            request = _request_in(args, values)
            if _is_starlette(request):
                from anyio.from_thread import run  # the view is called in a thread

                payload = run(request.body)
            else:
                payload = _payload(request)
            refused = refusal(request, payload, values)
            return view(*args, **values) if refused is None else refused

        async def areceive(*args: Any, **values: Any) -> Any:
            request = _request_in(args, values)
            payload = await request.body() if _is_starlette(request) else _payload(request)
            refused = refusal(request, payload, values)
            coroutine: Any = view
            return await coroutine(*args, **values) if refused is None else refused

        signature = inspect.signature(view)
        parameters = signature.parameters
        decorated: Any = functools.wraps(view)(
            areceive if inspect.iscoroutinefunction(view) else receive
        )
        decorated.csrf_exempt = True  # of Django
        decorated.__signature__ = signature.replace(parameters=_of_fastapi(parameters))
        typed: Callable[..., R] = decorated
        return typed

    return decorate


def _of_fastapi(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters whose values FastAPI finds in a request."""
    found = [each for name, each in parameters.items() if name != "callback"]
    if "request" in parameters:
        return found
    try:
        from starlette.requests import Request
    except ImportError:
        return found
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter("request", kind, annotation=Request), *found]


def _request_in(args: Sequence[Any], values: Mapping[str, Any]) -> Any:
    """Return the request of Django or Starlette in the arguments of a view, or that of Flask."""
    for each in (*args, *values.values()):
        if _is_django(each) or _is_starlette(each):
            return each
    from flask import request

    return request


def _is_django(request: Any) -> bool:
    return hasattr(request, "META")


def _is_starlette(request: Any) -> bool:
    return hasattr(request, "receive") and hasattr(request, "scope")


def _payload(request: Any) -> bytes:
    payload: bytes = request.body if _is_django(request) else request.get_data()
    return payload


def _response(request: Any, status: int, text: str) -> Any:
    headers = {"Allow": "POST"} if status == 405 else {}
    kind = "text/plain"
    if _is_django(request):
        from django.http import HttpResponse

        return HttpResponse(text, kind, status, headers=headers)
    if _is_starlette(request):
        from starlette.responses import Response

        return Response(text, status, headers, kind)
    from flask import Response as FlaskResponse

    return FlaskResponse(text, status, headers, content_type=kind)
