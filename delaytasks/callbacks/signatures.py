"""Signatures of callbacks, as specified by Standard Webhooks, and the views that receive them."""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from delaytasks.model.clock import wall_ms
from delaytasks.model.errors import ConfigError, InvalidInputError
from delaytasks.model.text import SecretBytes

R = TypeVar("R")

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
#: A callback is refused if its timestamp differs by more than this: it may be a replay.
TOLERANCE_S = 300.0
#: Secrets begin with this prefix, by which tools recognize and hide them.
_PREFIX = "whsec_"
#: The lengths that the standard allows.
_KEY_BYTES = range(24, 65)


class Received(NamedTuple):
    """A callback with a valid signature.

    A callback may arrive several times, each time with the same `id`.
    """

    id: str
    body: Any


class SigningKeys:
    """Secrets of the form `whsec_…`. While one replaces another, both are valid."""

    def __init__(self, secrets: str | Iterable[str]) -> None:
        secrets = secrets.split() if isinstance(secrets, str) else list(secrets)
        self._keys = [_key(secret, number) for number, secret in enumerate(secrets, 1)]

    def __len__(self) -> int:
        return len(self._keys)

    def sign(self, id: str, timestamp: str, payload: bytes) -> str:
        """Return a signature by each key. The receiver needs one of the keys."""
        signed = b".".join((id.encode(), timestamp.encode(), payload))
        digests = (hmac.digest(key, signed, "sha256") for key in self._keys)
        return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def verify(payload: bytes, headers: Mapping[str, str], secrets: str | Iterable[str]) -> Received:
    """Check the signature of a callback, and return the callback.

    Parameters
    ----------
    payload
        The body of the request, exactly as it arrived.
    headers
        The headers of the request.
    secrets
        The secrets of the form `whsec_…`, as a list or separated by spaces. The callback must be
        signed by one of them.

    Returns
    -------
    Received
        The callback's id and its body.

    Raises
    ------
    InvalidInputError
        If `argument` is "headers", the callback is not signed by one of the secrets, or its
        timestamp is too old or too new: answer with status 401. If it is "body", the body is not
        JSON: answer with status 400.
    ConfigError
        `secrets` is empty, or has a secret that is not of the form `whsec_…`.

    Examples
    --------
    >>> received = verify(request.get_data(), request.headers, secrets)
    >>> ship(received.body["order"])
    """
    keys = SigningKeys(secrets)
    if not keys:
        raise ConfigError("no signature can be checked without a secret")
    lowered = {name.lower(): value for name, value in headers.items()}
    id, timestamp, given = (
        lowered.get(name, "").encode(errors="replace").decode()
        for name in (ID, TIMESTAMP, SIGNATURE)
    )
    if not (id and timestamp and given):
        rule = f"the headers {ID}, {TIMESTAMP} and {SIGNATURE} are required"
        raise InvalidInputError(rule, "headers")
    right = keys.sign(id, timestamp, payload).split()
    # All are compared, so that the time that this takes says nothing about the right signature.
    found = [
        hmac.compare_digest(signature.encode(), expected.encode())
        for signature in given.split()
        for expected in right
    ]
    if not any(found):
        raise InvalidInputError("no signature is by one of the secrets", "headers")
    is_number = timestamp.isascii() and timestamp.isdigit()
    if not is_number or abs(wall_ms() / 1000 - int(timestamp[:12])) > TOLERANCE_S:
        raise InvalidInputError(
            f"signed more than {TOLERANCE_S:g} s ago, or in the future; are both clocks right?",
            "headers",
        )
    try:
        return Received(id, json.loads(payload))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the callback's body is not JSON ({error})", "body") from None


def _key(secret: str, number: int) -> bytes:
    prefix, text = secret[: len(_PREFIX)], secret[len(_PREFIX) :]
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if prefix != _PREFIX or len(key) not in _KEY_BYTES:
        raise ConfigError(
            f"callback secret {number} is not of the form whsec_…, base64 of 24 to 64 bytes"
        )
    return SecretBytes(key)


# -- Views of Django, Flask, FastAPI and Starlette ------------------------------------------------


def webhook(secrets: str | Iterable[str]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a view so that only signed callbacks reach it.

    The view is one of Django or Flask, which may be a coroutine function, or a coroutine function
    of FastAPI or Starlette with the parameter `request`. Its parameter `callback` receives the
    `Received` with the id and the body of the callback. Requests without a valid signature are
    answered with 401, and bodies that are not JSON with 400. Django does not check a CSRF token.

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
        def answer(request: Any, payload: bytes, /, *args: Any, **values: Any) -> Any:
            try:
                callback = verify(payload, request.headers, known)
            except InvalidInputError as error:
                return _response(request, 401 if error.argument == "headers" else 400, str(error))
            return view(*args, **values, callback=callback)

        def receive(*args: Any, **values: Any) -> Any:
            request = _request_in([*args, *values.values()])
            return answer(request, _payload(request), *args, **values)

        async def areceive(*args: Any, **values: Any) -> Any:
            request = _request_in([*args, *values.values()])
            payload = await request.body() if _is_starlette(request) else _payload(request)
            answered = answer(request, payload, *args, **values)
            return await answered if inspect.isawaitable(answered) else answered

        is_async = inspect.iscoroutinefunction(view)
        decorated: Any = functools.wraps(view)(areceive if is_async else receive)
        decorated.csrf_exempt = True  # of Django
        # FastAPI gives a value for each parameter in it. Old versions would look for the names of
        # annotations in this module.
        try:
            signature = inspect.signature(view, eval_str=True)
        except NameError:  # imported for type checkers only
            signature = inspect.signature(view)
        others = [each for name, each in signature.parameters.items() if name != "callback"]
        decorated.__signature__ = signature.replace(parameters=others)
        typed: Callable[..., R] = decorated
        return typed

    return decorate


def _request_in(arguments: Iterable[Any]) -> Any:
    """Return the request of Django or Starlette in the arguments of a view, or that of Flask."""
    for each in arguments:
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
    if _is_django(request):
        from django.http import HttpResponse

        return HttpResponse(text, "text/plain", status)
    if _is_starlette(request):
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(text, status)
    return text, status, {"Content-Type": "text/plain"}
