"""Receivers of callbacks in Flask, Django and FastAPI reject missing and invalid signatures."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request

from delaytasks.callbacks import webhook
from delaytasks.callbacks.signatures import SigningKeys
from delaytasks.model.clock import wall_ms
from tests.integration.test_mounts import AsgiClient

OLD, NEW, OTHER = ("whsec_" + base64.b64encode(byte * 32).decode() for byte in (b"o", b"n", b"x"))
#: Sends a payload and headers; returns the status and the arguments of the view.
Send = Callable[..., tuple[int, Any]]


def shown(callback: Any, order: int) -> dict[str, Any]:
    return {"id": callback.id, "body": callback.body, "order": order}


def receiver_of(view: Callable[..., Any], is_async: bool) -> Any:
    """Return a receiver with the parameters of `view`, which is a coroutine function if asked."""

    @functools.wraps(view)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        return view(*arguments, **named)

    return webhook(secret for secret in (OLD, NEW))(awaited if is_async else view)


def in_flask(is_async: bool) -> Iterator[Send]:
    from flask import Flask

    app = Flask("receiver")

    def paid(order: int, callback: Any) -> Any:
        return shown(callback, order)

    view = receiver_of(paid, is_async)
    app.add_url_rule("/paid/<int:order>", view_func=view, methods=["POST"])

    def send(payload: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        answer = app.test_client().post("/paid/7", data=payload, headers=headers)
        return answer.status_code, answer.get_json(silent=True)

    yield send


def in_django(is_async: bool) -> Iterator[Send]:
    from tests.integration import django_settings

    with django_settings.configured():
        from django.http import JsonResponse
        from django.test import Client, override_settings
        from django.urls import path

        def paid(request: Any, order: int, callback: Any) -> Any:
            assert request.method == "POST"
            return JsonResponse(shown(callback, order))

        view = receiver_of(paid, is_async)
        urls = type("Urls", (), {"urlpatterns": [path("paid/<int:order>", view)]})

        def send(payload: bytes, headers: dict[str, str]) -> tuple[int, Any]:
            # The client checks CSRF tokens, like Django does for browsers.
            client = Client(enforce_csrf_checks=True, headers=headers)
            answer = client.post("/paid/7", payload, "application/json")
            return answer.status_code, answer.json() if answer.status_code == 200 else None

        csrf = ["django.middleware.csrf.CsrfViewMiddleware"]
        with override_settings(ROOT_URLCONF=urls, ALLOWED_HOSTS=["testserver"], MIDDLEWARE=csrf):
            yield send


def in_fastapi(is_async: bool) -> Iterator[Send]:
    app = FastAPI()

    def paid(order: int, request: Request, callback: Any) -> dict[str, Any]:
        assert request.url.path == "/paid/7"
        return shown(callback, order)

    view = receiver_of(paid, is_async)
    app.add_api_route("/paid/{order}", view, methods=["POST"])
    yield asgi_sender(app)


def asgi_sender(app: Any) -> Send:
    def send(payload: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        answer = AsgiClient(app).get("/paid/7", "POST", content=payload, headers=headers)
        return answer.status_code, answer.json() if answer.status_code == 200 else None

    return send


@pytest.fixture(
    params=[
        (in_flask, False), (in_flask, True), (in_django, False), (in_django, True),
        (in_fastapi, True),
    ]
)  # fmt: skip
def send(request: pytest.FixtureRequest) -> Iterator[Send]:
    receiver, is_async = request.param
    yield from receiver(is_async)


PAYLOAD = '{"order": 7, "name": "é"}'.encode()


def signed(secret: str, payload: bytes = PAYLOAD, age_s: int = 0) -> dict[str, str]:
    timestamp = str(wall_ms() // 1000 - age_s)
    signature = SigningKeys(secret).sign("42", timestamp, payload)
    return {"webhook-id": "42", "webhook-timestamp": timestamp, "webhook-signature": signature}


def test_a_view_receives_what_is_signed_and_refuses_the_rest(send: Send) -> None:
    received = {"id": "42", "body": {"order": 7, "name": "é"}, "order": 7}
    assert send(PAYLOAD, signed(OLD)) == (200, received)
    assert send(PAYLOAD, signed(NEW)) == (200, received)
    for headers in ({}, signed(NEW, age_s=301), signed(OTHER), signed(NEW, b"{}")):
        assert send(PAYLOAD, headers) == (401, None), headers
    assert send(b"{nope", signed(NEW, b"{nope")) == (400, None)
